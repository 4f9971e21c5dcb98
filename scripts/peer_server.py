"""Serves a library over HTTP, so that it is measured with the client that measures servers.

As little of OpenAI's /v1/completions as bench.py asks for, a thread for each connection. Standard
library only: it runs in the peer's own environment. The engine is called by one thread alone.
"""

import argparse
import json
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol


@dataclass
class Request:
    """`tokens` gets the text of each generated token, an error if there was one, then None."""

    prompt: str
    max_tokens: int
    num_prompt: int = 0  # tokens, set before the first text
    tokens: "queue.SimpleQueue[str | None | Exception]" = field(default_factory=queue.SimpleQueue)


class Engine(Protocol):
    def run(self, take: Callable[[bool], Sequence[Request]]) -> None:
        """For ever: `take(wait)` gives what has come; with `wait`, at least one request."""


class Inbox:
    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def take(self, wait: bool) -> list[Request]:
        taken = [self.requests.get()] if wait else []
        while not self.requests.empty():
            taken.append(self.requests.get())
        return taken


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    inbox: Inbox

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = Request(body["prompt"], body["max_tokens"])
        self.inbox.requests.put(request)
        if body.get("stream"):
            self._stream(request)
            return
        texts = list(iter(request.tokens.get, None))
        if errors := [text for text in texts if isinstance(text, Exception)]:
            self._answer(500, {"error": {"message": str(errors[0])}})
        else:
            self._answer(200, event("".join(map(str, texts)), request, len(texts)))

    def _answer(self, status: int, said: dict[str, Any]) -> None:
        payload = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _stream(self, request: Request) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        num_sent, error = 0, None
        for text in iter(request.tokens.get, None):
            if isinstance(text, Exception):
                error = text
            else:
                num_sent += 1
                self._send({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        told = {"error": {"message": str(error)}} if error else event("", request, num_sent)
        self._send(told)
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, said: dict[str, Any]) -> None:
        payload = b"data: " + json.dumps(said).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload))

    def log_message(self, format: str, *args: object) -> None:
        pass


def event(text: str, request: Request, num_tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": request.num_prompt, "completion_tokens": num_tokens}
    return {"choices": [{"index": 0, "text": text, "finish_reason": "length"}], "usage": usage}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def serve(load: Callable[[argparse.Namespace], Engine], about: str) -> None:
    """Load the engine, then listen: whoever is answered finds it ready."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--max-batch-size", type=int, default=32)
    asked = parser.parse_args()
    engine, inbox = load(asked), Inbox()
    Handler.inbox = inbox
    threading.Thread(target=engine.run, args=(inbox.take,), daemon=True).start()
    Server(("127.0.0.1", asked.port), Handler).serve_forever()
