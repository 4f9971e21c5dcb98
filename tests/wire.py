"""A client on a bare socket, which can leave in every way, and a server for it in this process.

Client and server take turns on one hub: nothing here may wait in another way.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import gevent
from gevent import socket as gevent_socket

from app.api import create_app
from app.edge import bind
from app.service import Service


class Client:
    """One connection. Use as a context manager."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.socket = gevent_socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", port))
        self._reader = self.socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, path: str = "/generate", **body: Any) -> None:
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)

    def read(self) -> tuple[int, bytes]:
        """Status and body of the next answer, whole."""
        status = int(self._reader.readline().split()[1])
        headers = dict(self._header_lines())
        if headers.get(b"transfer-encoding") == b"chunked":
            return status, b"".join(self._chunks())
        length = int(headers[b"content-length"])
        if len(body := self._reader.read(length)) < length:
            raise ValueError(f"the answer is cut off behind {body!r}")
        return status, body

    def read_until(self, mark: bytes) -> bytes:
        received = b""
        while mark not in received:
            received += self._reader.read1(4096) or _fail(received)
        return received

    def is_shut(self) -> bool:
        """What comes next is the end."""
        return self._reader.read(1) == b""

    def close(self) -> None:
        self._reader.close()
        self.socket.close()

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def _header_lines(self) -> Iterator[tuple[bytes, bytes]]:
        while line := self._reader.readline().strip():
            name, _, value = line.partition(b":")
            yield name.lower(), value.strip()

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self._reader.readline(), 16):
            yield self._reader.read(size)
            self._reader.readline()
        self._reader.readline()


WAYS: dict[str, Callable[[Client], None]] = {
    "close": Client.close,
    "reset": Client.reset,
    "half-close": Client.half_close,
}


@contextmanager
def listening(service: Service, **changed: Any) -> Iterator[Any]:
    """The service's server, on a free port, with `changed` settings."""
    server = bind(create_app(service), replace(service.settings, **changed))
    server.start()
    try:
        with gevent.Timeout(250):
            yield server
    finally:
        server.stop(timeout=0)


def _fail(received: bytes) -> bytes:
    raise AssertionError(f"the connection ended behind {received!r}")
