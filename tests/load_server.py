"""A small real HTTP server for the load client; it counts two tokens for a word of a prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

SCRIPTS = Path(__file__).parents[1] / "scripts"
Body = dict[str, Any]


class FakeHandler(BaseHTTPRequestHandler):
    """`/generate` and OpenAI's two routes, in chunks that end where no event does."""

    protocol_version = "HTTP/1.1"
    server: FakeServer
    is_new = True

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, b"{}", "application/json")

    def do_POST(self) -> None:
        self.server.num_connections += self.is_new
        self.is_new = False
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        status, events = self.server.answer(body)
        if status == 200 and self.path != "/generate":
            events = [as_openai(event, "chat" in self.path) for event in events]
        if status == 200 and body["stream"]:
            stream = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events)
            stream += b"" if self.path == "/generate" else b"data: [DONE]\n\n"
            self._answer(status, b": a comment\n\n" + stream, "text/event-stream")
        else:
            self._answer(status, json.dumps(events[-1]).encode(), "application/json")

    def _answer(self, status: int, payload: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        for at in range(0, len(payload), 7):
            part = payload[at : at + 7]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


def as_openai(event: Body, is_chat: bool) -> Body:
    said = {"delta": {"content": event["text"]}} if is_chat else {"text": event["text"]}
    choice = said | {"index": 0, "finish_reason": event.get("finish_reason")}
    usage = {"usage": event["usage"]} if "usage" in event else {}
    return {"choices": [choice]} | usage


class FakeServer(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close() waits for the handlers
    request_queue_size = 64

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), FakeHandler)
        self.bodies: list[Body] = []
        self.headers: dict[str, str] = {}
        self.num_connections = 0  # that sent a POST

    def answer(self, body: Body) -> tuple[int, list[Body]]:
        """Status, and the events of a stream; the last stands alone where none was asked for."""
        said = body.get("prompt") or " ".join(part["content"] for part in body["messages"])
        num_tokens = body["max_tokens"]
        usage = {"prompt_tokens": 2 * len(said.split()), "completion_tokens": num_tokens}
        last = {"text": "", "finish_reason": "length", "usage": usage}
        return 200, [{"text": "word "}] * num_tokens + [last]


class RefusingServer(FakeServer):
    """Too busy for whatever streams, `num_refusals` times."""

    def __init__(self, num_refusals: int = 10**6) -> None:
        super().__init__()
        self.num_left = num_refusals

    def answer(self, body: Body) -> tuple[int, list[Body]]:
        if not body["stream"] or self.num_left == 0:
            return super().answer(body)
        self.num_left -= 1
        return 429, [{"error": {"message": "come back later"}}]


@contextmanager
def serving(server: FakeServer) -> Iterator[str]:
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(SCRIPTS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def run_bench(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script("bench.py", "--url", url, *arguments)


if __name__ == "__main__":  # python -m tests.load_server PORT
    FakeServer(int(sys.argv[1])).serve_forever()
