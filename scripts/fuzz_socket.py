"""Send hostile bytes to a running server; hold every answer against what must be true of it.

    python scripts/fuzz_socket.py --url http://127.0.0.1:8080 [--requests 10000] [--seed N] \\
        [--workers 8] [--pid PID] [--json FILE]

Each connection carries one to three requests, made of right ones (GET, POST with a length, POST in
chunks) by a few random changes: bytes that are flipped, cut out, doubled or put in, headers that
are doubled, left out or made up, wrong lengths, wrong chunks, ends in the middle. Then the client
waits for the end, or leaves at once, with a reset or without one.

What must hold: what comes back are whole HTTP answers, at most one for each request line that was
sent, none of them a 5xx but a 503; an error is OpenAI's object; behind `Connection: close` nothing
comes; and the connection ends within --patience seconds. Every 500 connections, and at the end,
/health/live must answer 200 within a second. With --pid, memory and open files of that process are
compared behind the first tenth and at the end.

Prints answers by status, then what failed, each kind with its first request. The last line on
stdout is one JSON object with everything. Exit status 1 if anything failed.
"""

import json
import random
import re
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import click

BODY = b'{"prompt": "a", "max_tokens": 2}'
HEAD = [b"Host: x", b"Content-Type: application/json"]
RIGHT = [
    b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"HEAD /info HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\n".join([b"POST /generate HTTP/1.1", *HEAD, b"Content-Length: 32", b"", BODY]),
    b"\r\n".join([b"POST /tokenize HTTP/1.1", *HEAD, b"Content-Length: 32", b"", BODY]),
    b"\r\n".join(
        [
            *(b"POST /v1/completions HTTP/1.1", *HEAD, b"Transfer-Encoding: chunked", b""),
            *(b"10", BODY[:16], b"10", BODY[16:], b"0", b"", b""),
        ]
    ),
]
PIECES = [
    *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\0", b" ", b"\t", b":", b";", b"%00", b"%0d%0a", b"//"),
    *(b"\x7f", b"\xff", b"\xc3\xa9", b"..", b"HTTP/1.1", b"HTTP/9.9", b"0\r\n\r\n", b"{" * 200),
    *(b"chunked", b"gzip", b"-1", b"+5", b"0x10", b"99999999999999999999", b"1e3", b"A" * 9000),
]
LINES = [
    *(b"Content-Length: 0", b"Content-Length: 5", b"Content-Length: +5", b"Content-Length: 5, 5"),
    *(b"Content-Length: 1000000000000", b"Content-Length : 5", b"Content-Length:"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: x"),
    *(
        b"Host: y",
        b"Host: \xff",
        b"Host: a b",
        b"Host: " + b"h" * 300,
        b"Host: ..",
        b"Host: x:99999",
    ),
    *(b"Expect: 100-continue", b"Expect: x", b"Connection: close", b"Connection: keep-alive"),
    *(b"Upgrade: websocket", b"Connection: upgrade", b"X-Request-Id: \xff", b" folded"),
    *(b"Content-Type: text/plain", b"Content-Encoding: gzip", b"Cookie: a", b"Range: bytes=0-1"),
    *(
        b"X-Request-Timeout: -1",
        b"Authorization: Bearer x",
        b"Forwarded: x",
        b"X: " + b"x" * 40_000,
    ),
]


@dataclass
class Tally:
    """What was sent and what came of it. Failures by kind, with the first request of each."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)
    num_failures: int = 0
    process: dict[str, list[int]] = field(default_factory=dict)

    def failed(self, kind: str, sent: bytes = b"") -> None:
        self.num_failures += 1
        self.failures.setdefault(kind, repr(sent[:400]))


def hostile(dice: random.Random) -> bytes:
    """One to three requests, or what was made of them."""
    made = [_change(dice.choice(RIGHT), dice) for _ in range(dice.choice([1, 1, 2, 3]))]
    return b"".join(made)


def _change(request: bytes, dice: random.Random) -> bytes:
    for _ in range(dice.choice([0, 1, 1, 1, 2, 3])):
        at = dice.randrange(len(request) + 1)
        kind = dice.randrange(7)
        if kind == 0:
            request = request[:at] + bytes([dice.randrange(256)]) + request[at + 1 :]
        elif kind == 1:
            request = request[:at] + request[at + dice.randrange(1, 20) :]
        elif kind == 2:
            request = request[:at] + dice.choice(PIECES) + request[at:]
        elif kind == 3:
            request = request[:at] + request[max(0, at - dice.randrange(1, 40)) :]
        elif kind == 4:
            request = request[:at]
        else:
            lines = request.split(b"\r\n")
            lines.insert(dice.randrange(1, len(lines) + 1), dice.choice(LINES))
            request = b"\r\n".join(lines)
    return request


def exchange(address: tuple[str, int], sent: bytes, ending: str, patience: float) -> bytes | None:
    """All that comes back; None from a client that does not wait. Raises TimeoutError."""
    received = b""
    with socket.create_connection(address, timeout=patience) as connection:
        ends_at = monotonic() + patience
        try:
            connection.sendall(sent)
            if ending == "leave":
                return None
            if ending == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return None
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                received += data
                if monotonic() > ends_at:
                    raise TimeoutError
        except TimeoutError:
            raise
        except OSError:  # refused before all was sent: what had come is lost, which TCP may do
            return None
    return received


def check(sent: bytes, received: bytes, tally: Tally) -> None:
    """Tells the tally of the answers, and of what is wrong with them."""
    num_answers, is_last = 0, False
    while received:
        if is_last:
            return tally.failed("more behind Connection: close", sent)
        head, separator, received = received.partition(b"\r\n\r\n")
        first = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
        if not (first and separator):
            return tally.failed("not an HTTP answer", sent)
        status = int(first[1])
        if status == 100:
            continue
        num_answers += 1
        tally.statuses[str(status)] += 1
        if status >= 500 and status != 503:
            tally.failed(f"status {status}", sent)
        is_last = b"\r\nConnection: close" in head
        length = re.search(rb"\r\nContent-Length: (\d+)", head)
        if length is None:
            return None  # a page in chunks, or the rest is unknown
        body, received = received[: int(length[1])], received[int(length[1]) :]
        if len(body) < int(length[1]):  # HEAD, or cut off
            received = body if body.startswith(b"HTTP/1.1 ") else b""
            continue
        if body.startswith(b"HTTP/1.1 "):  # behind the answer to a HEAD
            received = body + received
        elif status >= 400 and "error" not in _object(body):
            tally.failed(f"status {status} without an error object", sent)
    if num_answers > sent.count(b"/") + 1:
        tally.failed("more answers than requests", sent)
    return None


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def is_alive(address: tuple[str, int]) -> bool:
    try:
        received = exchange(address, RIGHT[0], "wait", 1)
    except OSError:
        return False
    return received is not None and received.startswith(b"HTTP/1.1 200 ")


def fuzz(
    url: str,
    num_requests: int,
    seed: int,
    *,
    num_workers: int = 4,
    patience: float = 5,
    look: Callable[[], dict[str, int]] = dict,
) -> Tally:
    """`look` tells what must not grow, by name."""
    parts = urlsplit(url)
    address = (str(parts.hostname), int(parts.port or 80))
    tally, dice = Tally(), random.Random(seed)

    def one(sent: bytes, ending: str) -> tuple[bytes, bytes | None | Exception]:
        try:
            return sent, exchange(address, sent, ending, patience)
        except OSError as error:
            return sent, error

    before: dict[str, int] = {}
    endings = ["wait"] * 8 + ["leave", "reset"]
    plan = [(hostile(dice), dice.choice(endings)) for _ in range(num_requests)]
    with ThreadPoolExecutor(num_workers) as pool:
        for done in range(0, num_requests, 500):
            part = plan[done : done + 500]
            for sent, received in pool.map(lambda each: one(*each), part):
                if isinstance(received, Exception):
                    tally.failed(f"{type(received).__name__}", sent)
                elif received is not None:
                    check(sent, received, tally)
            if not is_alive(address):
                tally.failed("/health/live does not answer")
            if not before and done + 500 >= num_requests // 10:
                before = look()
    after = look()
    tally.process = {name: [before.get(name, 0), value] for name, value in after.items()}
    return tally


def look_at(pid: int | None) -> dict[str, int]:
    """Resident bytes and open files of a process."""
    if pid is None:
        return {}
    import psutil

    process = psutil.Process(pid)
    return {"rss_bytes": process.memory_info().rss, "open_files": process.num_fds()}


@click.command(help=__doc__)
@click.option("--url", required=True)
@click.option("--requests", "num_requests", default=10_000, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--workers", "num_workers", default=8, show_default=True)
@click.option("--patience", default=15.0, show_default=True)
@click.option("--pid", type=int, default=None)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
def main(
    url: str,
    num_requests: int,
    seed: int,
    num_workers: int,
    patience: float,
    pid: int | None,
    json_path: Path | None,
) -> None:
    started_at = monotonic()
    tally = fuzz(
        url,
        num_requests,
        seed,
        num_workers=num_workers,
        patience=patience,
        look=lambda: look_at(pid),
    )
    for status, count in sorted(tally.statuses.items()):
        print(f"{status}  {count}")
    for name, (before, after) in tally.process.items():
        print(f"{name}  {before} -> {after}")
    for kind, example in tally.failures.items():
        print(f"FAILED {kind}: {example}")
    result = {
        "seed": seed,
        "connections": num_requests,
        "seconds": round(monotonic() - started_at, 1),
        "statuses": dict(sorted(tally.statuses.items())),
        "process": tally.process,
        "num_failures": tally.num_failures,
        "failures": tally.failures,
    }
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(tally.num_failures > 0)


if __name__ == "__main__":
    main()
