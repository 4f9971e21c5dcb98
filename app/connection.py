"""One connection: its requests are read by `framing` and `body`, answered by the app, told to the
access log; then it is closed in such a way that the last answer arrives.

pywsgi stays for what it does to answers. It knows no routes but those that a full server answers.
"""

from __future__ import annotations

import email.utils
import logging
import socket
import time
import uuid
from http import HTTPStatus
from io import BufferedReader
from typing import Any
from urllib.parse import unquote

import orjson
from gevent import GreenletExit
from gevent.pywsgi import WSGIHandler

from . import direct
from .access import NOTE, tell
from .body import Body
from .cors import Cors
from .departure import ENVIRON_KEY, Departure
from .errors import ServeError, TooManyConnections
from .framing import Head, Reader, next_turn, read_fields, read_request_line
from .traced import TRACED, Traced

log = logging.getLogger(__name__)

_PIECE = 65536  # bytes that a client must take within the time limit
_RESERVED = ("/health/", "/metrics")
_SPARE_SECONDS = 1.0  # in which a connection beyond the limit must have asked
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 4 << 20


class NotTaken(ConnectionError):
    """The client takes no more of its answer."""


class Connection(WSGIHandler):  # type: ignore[misc]  # gevent.pywsgi has no types
    """One connection. `is_spare`: it is beyond the limit, and gets one short answer."""

    response_headers: list[tuple[bytes, bytes]]

    def __init__(self, sock: Any, address: Any, server: Any, is_spare: bool) -> None:
        super().__init__(sock, address, server, rfile=Reader(sock))
        self.settings = server.settings
        self.is_spare = is_spare
        self.head: Head | None = None
        self.note: dict[str, Any] = {}
        self.traced: Traced | None = None
        self.has_left = False
        self.is_refused = False
        self.is_idle = True

    def handle(self) -> None:
        self._set_socket_options()
        try:
            waits = self.settings.header_timeout_ms
            while self._serve_one(waits / 1000):
                next_turn()  # or a client with a thousand requests would starve all others
                if self.server.is_stopping:  # it was not idle when those that are were closed
                    break
                waits = self.settings.keepalive_timeout_ms
        except OSError:
            self.has_left = True
        except GreenletExit:  # the server stops
            raise
        except BaseException:
            log.exception("a connection has failed")
        finally:
            self._hang_up()
            # Both lead back here: with them the last answer would stay until a collection.
            for name in ("environ", "wsgi_input"):
                self.__dict__.pop(name, None)

    def _serve_one(self, idle_seconds: float) -> bool:
        """May another request follow?"""
        self.head, self.note, self.is_refused = None, {}, False
        self.traced = Traced() if self.server.tracing is not None else None
        self.is_idle = True
        if not self.rfile.wait(time.monotonic() + self._seconds(idle_seconds)):
            return False
        self.is_idle = False
        self.time_start = time.monotonic()
        try:
            head = self._read_head()
        except ServeError as error:
            self._refuse(error)
            return False
        self.command, self.request_version = head.method, head.version
        self.close_connection = head.is_last or self.is_spare
        self.environ = self._environ(head)
        self.handle_one_response()
        return not (self.close_connection or self.server.is_stopping)

    def _seconds(self, seconds: float) -> float:
        return min(seconds, _SPARE_SECONDS) if self.is_spare else seconds

    def _read_head(self) -> Head:
        limit = self._seconds(self.settings.header_timeout_ms / 1000)
        deadline = self.time_start + limit
        self.head = head = read_request_line(self.rfile, self.settings, deadline)
        read_fields(self.rfile, head, self.settings, deadline)
        if self.is_spare and not head.path.startswith(_RESERVED):
            raise TooManyConnections("too many connections are open (MAX_CONNECTIONS)")
        return head

    def _environ(self, head: Head) -> dict[str, Any]:
        environ: dict[str, Any] = self.server.get_environ()
        for name, value in head.fields:
            if "_" not in name:  # it would pass for the name with a hyphen
                key = "HTTP_" + name.upper().replace("-", "_")
                environ[key] = f"{environ[key]},{value}" if key in environ else value
        for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            if (value := environ.pop(f"HTTP_{name}", None)) is not None:
                environ[name] = value
        if head.host is not None:
            environ["HTTP_HOST"] = head.host
        self.wsgi_input = Body(self.rfile, head, self.settings, self._send_continue)
        if self.traced is not None:
            environ[TRACED] = self.traced
        return environ | {
            "REQUEST_METHOD": head.method,
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote(head.path, "latin-1"),
            "QUERY_STRING": head.query,
            "SERVER_PROTOCOL": head.version,
            "REMOTE_ADDR": self._client() or "",
            "wsgi.input": BufferedReader(self.wsgi_input),
            "wsgi.input_terminated": True,
            NOTE: self.note,
            ENVIRON_KEY: Departure(self.socket),
            direct.ENVIRON_KEY: direct.Outlet(self),
        }

    def _send_continue(self) -> None:
        self._send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def handle_one_response(self) -> None:
        self.status = self.code = None
        self.headers_sent = self.response_use_chunked = self.connection_upgraded = False
        self.result = None
        self.response_length = 0
        try:
            self.application = self.server.application
            self.run_application()
        except NotTaken:
            self.close_connection = True
        except GreenletExit:  # the server stops
            raise
        except BaseException:  # a panic in Rust is no Exception; gevent would end with an exit
            self.close_connection = True
            log.exception("request %s failed outside of the app", self.note.get("request_id"))
            if not self.headers_sent:
                self._refuse(ServeError("the server failed on this request"))
        finally:
            if not self.is_refused:
                self._log(self.code or 500)

    def run_application(self) -> None:
        with self.environ[ENVIRON_KEY] as departure:
            try:
                super().run_application()
            finally:
                self.has_left |= departure.has_left
                if (outlet := self.environ.get(direct.ENVIRON_KEY)) is not None:
                    self.response_length += outlet.num_sent

    def finalize_headers(self) -> None:
        super().finalize_headers()
        names = {name.lower() for name, _ in self.response_headers}
        has_length = b"content-length" in names or self.code in (204, 304)
        if self.command == "HEAD":
            self.response_use_chunked = False
        elif not (has_length or self.response_use_chunked):  # a stream, in HTTP/1.0
            self.close_connection = True  # nothing else tells its end
        self.wsgi_input.skip_what_has_come()
        # What is left of a body would be taken for a request.
        if self.server.is_stopping or not self.wsgi_input.is_whole:
            self.close_connection = True
        if self.close_connection:  # pywsgi may have said otherwise, to HTTP/1.0
            kept = [each for each in self.response_headers if each[0].lower() != b"connection"]
            self.response_headers = [*kept, (b"Connection", b"close")]

    def _sendall(self, data: Any) -> None:
        self._send(data)
        self.response_length += len(data)

    def _send(self, data: Any) -> None:
        if self.has_left:  # in the middle of a write: what follows would not be understood
            raise NotTaken("it has taken no more before")
        view = memoryview(data)
        try:
            self.socket.settimeout(self.settings.write_timeout_ms / 1000)
            for start in range(0, len(view), _PIECE):
                self.socket.sendall(view[start : start + _PIECE])
        except OSError as error:
            self.has_left = True
            raise NotTaken(str(error)) from None

    def _refuse(self, error: ServeError) -> None:
        """An answer in the app's place; the connection ends behind it."""
        self.is_refused = self.close_connection = True
        self.server.count(error.code)
        request_id = self.note.setdefault("request_id", uuid.uuid4().hex)
        self.note["error"] = error.code
        body = orjson.dumps(error.body()) + b"\n"
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            f"Date: {email.utils.formatdate(usegmt=True)}",
            f"X-Request-Id: {request_id}",
            *(f"{name}: {value}" for name, value in self._said(error).items()),
            "Connection: close",
        ]
        answer = "\r\n".join([*lines, "\r\n"]).encode()
        if self.head is None or self.head.method != "HEAD":
            answer += body
        self.response_length = 0
        try:
            self._sendall(answer)
        except NotTaken:
            pass
        finally:
            self._log(error.status)

    def _said(self, error: ServeError) -> dict[str, str]:
        """Also what lets a browser's page read it, as far as its origin has been read."""
        fields = dict(self.head.fields) if self.head else {}
        return error.headers() | Cors(self.settings.cors_origins).headers(fields.get("origin"))

    def _log(self, status: int) -> None:
        request_id = self.note.pop("request_id", None) or uuid.uuid4().hex
        line: dict[str, Any] = {
            "request_id": request_id,
            "method": self.head.method if self.head else None,
            "path": self.head.path if self.head else None,
            "status": 499 if self.has_left else status,
            "num_bytes": self.response_length,
            "seconds": time.monotonic() - self.time_start,
            "client": self._client(),
            "note": self.note,
        }
        if self.traced is not None:
            self._trace(line, self.traced)
        tell(**line)

    def _trace(self, line: dict[str, Any], traced: Traced) -> None:
        if self.head is not None and self.head.method == "POST":  # it carries work
            self.note["trace_id"] = self.server.tracing.tell(line, self.head.fields, traced)
        traced.answer = None  # the environ stays until the next request

    def _client(self) -> str | None:
        address = self.client_address
        return str(address[0]) if isinstance(address, tuple) else None

    def _set_socket_options(self) -> None:
        # pywsgi writes head and body apart: Nagle's algorithm would hold the second one back for
        # the client's delayed ACK, 44 ms per answer on a kept connection.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit_ms = self.settings.tcp_user_timeout_ms
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_USER_TIMEOUT", limit_ms),
            ("TCP_KEEPIDLE", max(1, limit_ms // 2000)),
            ("TCP_KEEPINTVL", max(1, limit_ms // 6000)),
            ("TCP_KEEPCNT", 3),
        ):
            if hasattr(socket, name):
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def _hang_up(self) -> None:
        """To close with bytes unread would reset the connection, and the client might never read
        its answer: what it still sends is thrown away, for a moment."""
        try:
            if not (self.has_left or self.is_idle or self.rfile.is_at_end):
                self.socket.shutdown(socket.SHUT_WR)
                self._linger()
        except OSError:
            pass
        finally:
            self.socket.close()

    def _linger(self) -> None:
        ends_at = time.monotonic() + self._seconds(_LINGER_SECONDS)
        left = _LINGER_BYTES
        while left > 0 and (seconds := ends_at - time.monotonic()) > 0:
            self.socket.settimeout(seconds)
            if not (received := self.socket.recv(_PIECE)):
                return
            left -= len(received)
