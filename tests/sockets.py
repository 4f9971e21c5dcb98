"""The real server in this process, spoken to byte by byte."""

from __future__ import annotations

import json
import socket as native_socket
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import gevent
from gevent import socket

from app.api import create_app
from app.edge import Edge, bind
from app.service import Service

from .services import SETTINGS, StubService, running

GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def post(body: bytes, *lines: bytes, path: bytes = b"/tokenize") -> bytes:
    """A whole request with JSON; `lines` are more headers."""
    head = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Type: application/json"]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body), *lines, b"", body])


def chunked(body: bytes, *lines: bytes) -> bytes:
    """A request to /tokenize whose body is as given, framing included."""
    head = [b"POST /tokenize HTTP/1.1", b"Host: x", b"Content-Type: application/json"]
    return b"\r\n".join([*head, b"Transfer-Encoding: chunked", *lines, b"", body])


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """Of the error that it holds."""
        return str(json.loads(self.body)["error"]["code"])


class Client:
    def __init__(self, server: Edge) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.server_port))
        self._rest = b""

    @classmethod
    def early(cls, server: Edge, sent: bytes) -> Client:
        """What it sends is there before the server takes it in: no time limit of its runs before,
        however busy the machine is."""
        with native_socket.create_connection(("127.0.0.1", server.server_port)) as native:
            native.sendall(sent)
            client = cls.__new__(cls)
            client.socket = socket.socket(fileno=native.detach())
        client._rest = b""
        return client

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> Client:
        self.socket.sendall(data)
        return self

    def end(self) -> Client:
        """Sends no more."""
        self.socket.shutdown(socket.SHUT_WR)
        return self

    def reset(self) -> None:
        """Leaves without a word."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def read(self) -> Reply:
        """The next answer."""
        while b"\r\n\r\n" not in self._rest:
            self._receive()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = int(headers.get("content-length", 0))
        while len(self._rest) < length:
            self._receive()
        body, self._rest = self._rest[:length], self._rest[length:]
        return Reply(int(first.split()[1]), headers, body)

    def read_to_end(self) -> bytes:
        while received := self.socket.recv(65536):
            self._rest += received
        everything, self._rest = self._rest, b""
        return everything

    def only_reply(self) -> Reply:
        """The one answer, behind which the connection was closed."""
        reply = self.read()
        assert self.read_to_end() == b""
        return reply

    def _receive(self) -> None:
        received = self.socket.recv(65536)
        assert received, f"the connection has ended behind {self._rest!r}"
        self._rest += received


@contextmanager
def serving(app: Any = None, **changes: Any) -> Iterator[Edge]:
    """A server of a stub service, or of another app; `changes` are settings."""
    settings = replace(SETTINGS, **changes)
    with gevent.Timeout(250), ExitStack() as stack:
        if app is None:
            service = stack.enter_context(running(StubService(settings)))
            yield stack.enter_context(serving_of(service))
        else:
            yield stack.enter_context(_started(bind(app, settings)))


def serving_of(service: Service, **changes: Any) -> AbstractContextManager[Edge]:
    """A server of this one, which runs; `changes` are settings of the edge."""
    app, settings = create_app(service), replace(service.settings, **changes)
    return _started(bind(app, settings, service.metrics.rejected, service.tracing))


@contextmanager
def _started(server: Edge) -> Iterator[Edge]:
    server.start()
    try:
        yield server
    finally:
        server.stop(timeout=1)
