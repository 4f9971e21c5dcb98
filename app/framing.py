"""Where a request begins and ends on a socket: RFC 9112, read strictly.

Whatever two parsers could read differently is refused, as what lies behind it might run as another
request (smuggling). It knows no routes and sends nothing but `100 Continue`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import gevent

from .errors import (
    ExpectationFailed,
    HeadersTooLarge,
    MalformedRequest,
    PayloadTooLarge,
    SlowClient,
    UriTooLong,
)

if TYPE_CHECKING:
    from .config import Settings

_RECEIVE = 16384  # bytes at a time, also the most work between two turns of the hub
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_REQUEST_LINE = re.compile(rb"(%b{1,32}) ([\x21-\x7e]+) HTTP/(1\.[01])" % _TOKEN)
FIELD = re.compile(rb"(%b{1,256}):[ \t]*([\t\x20-\x7e\x80-\xff]*)" % _TOKEN)
_ABSOLUTE = re.compile(r"https?://([^/?#]+)(.*)", re.IGNORECASE)
_HOST = re.compile(r"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")
_LENGTH = re.compile(r"[0-9]{1,15}")
# Two of one of these, and two readers may believe different ones.
_ONCE = {"host", "content-length", "transfer-encoding", "content-type", "expect", "authorization"}


def next_turn() -> None:
    """Lets the hub look at all sockets once. `sleep(0)` does not: dozens of its callbacks run
    between two looks, 15 ms of a client's requests."""
    gevent.idle(gevent.get_hub().loop.MAXPRI)  # the highest, or whatever happens comes first


class Reader:
    """Bytes of one connection that have come and were not used yet."""

    closed = False  # pywsgi asks

    def __init__(self, sock: Any) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._has_filled = False
        self.is_at_end = False

    def __len__(self) -> int:
        return len(self._buffer)

    def fill(self, deadline: float) -> bool:
        """Waits for more until `deadline` (of `time.monotonic`); False if there is no more.

        Raises SlowClient, and OSError if the connection is broken.
        """
        if self._has_filled:
            next_turn()  # a client that sends without end leaves the hub to others
        self._has_filled = True
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            received = self._socket.recv(_RECEIVE)
        except TimeoutError:
            raise SlowClient("the request did not arrive in time") from None
        self._buffer += received
        self.is_at_end = not received
        return bool(received)

    def wait(self, deadline: float) -> bool:
        """Has another request begun by then?"""
        self._has_filled = False
        try:
            return bool(self._buffer) or self.fill(deadline)
        except SlowClient:
            return False

    def take(self, most: int) -> bytes:
        taken = bytes(self._buffer[:most])
        del self._buffer[:most]
        return taken

    def line(self, most: int, deadline: float, refuse: Callable[[], NoReturn]) -> bytes:
        """A line without its CRLF; `refuse` is called for one of more than `most` bytes."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0 and len(self) < most + 2:
            searched = len(self)
            if not self.fill(deadline):
                raise MalformedRequest("the request ends early")
        if end < 0 or end > most + 1:
            refuse()
        line = self.take(end + 1)
        if not line.endswith(b"\r\n"):
            raise MalformedRequest("a line ends without CR LF")
        return line[:-2]

    def begins_with_no_letter(self) -> bool:
        return not self._buffer[:1].isalpha() and self._buffer[:1] != b"\r"


@dataclass(slots=True)
class Head:
    """A request without its body; complete once `read_fields` has been through."""

    method: str
    path: str
    query: str
    version: str  # HTTP/1.1 or HTTP/1.0
    host: str | None = None  # of a request line that has it
    fields: list[tuple[str, str]] = field(default_factory=list)  # names in lower case

    @property
    def length(self) -> int | None:
        value = self.get("content-length")
        return int(value) if value is not None else None

    @property
    def is_chunked(self) -> bool:
        return self.get("transfer-encoding") is not None

    @property
    def expects_continue(self) -> bool:
        return self.version == "HTTP/1.1" and self.get("expect") is not None

    @property
    def is_last(self) -> bool:
        """Does the client want the connection closed behind the answer?"""
        wishes = {wish.strip().lower() for wish in (self.get("connection") or "").split(",")}
        return "close" in wishes or (self.version == "HTTP/1.0" and "keep-alive" not in wishes)

    def get(self, name: str) -> str | None:
        """The value of a field; of several, the values joined."""
        values = [value for known, value in self.fields if known == name]
        return ",".join(values) if values else None


def read_request_line(reader: Reader, settings: Settings, deadline: float) -> Head:
    """Raises MalformedRequest, UriTooLong and what `Reader.fill` raises."""
    most = settings.max_request_line

    def refuse() -> NoReturn:
        raise UriTooLong(f"the request line is longer than {most} bytes (MAX_REQUEST_LINE)")

    if reader.begins_with_no_letter():  # TLS, say, which may never send a line's end
        raise MalformedRequest("this is not HTTP")
    line = reader.line(most, deadline, refuse)
    if not line:  # one empty line in front is allowed
        line = reader.line(most, deadline, refuse)
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise MalformedRequest("the request line must be METHOD TARGET HTTP/1.1")
    method, target, version = (part.decode("latin-1") for part in found.groups())
    absolute = _ABSOLUTE.fullmatch(target)
    host, target = absolute.groups() if absolute else (None, target)
    if absolute and not target.startswith("/"):
        target = "/" + target
    if "#" in target or not (target.startswith("/") or (target, method) == ("*", "OPTIONS")):
        raise MalformedRequest("the request's target must be a path")
    path, _, query = target.partition("?")
    return Head(method, path, query, f"HTTP/{version}", host)


def read_fields(reader: Reader, head: Head, settings: Settings, deadline: float) -> None:
    """Completes `head`. Raises MalformedRequest, HeadersTooLarge, ExpectationFailed and what
    `Reader.fill` raises."""
    left = settings.max_header_bytes

    def refuse() -> NoReturn:
        raise HeadersTooLarge(
            f"the headers are more than {settings.max_header_bytes} bytes (MAX_HEADER_BYTES)"
        )

    while line := reader.line(left, deadline, refuse):
        left = max(left - len(line) - 2, 0)
        if len(head.fields) == settings.max_headers:
            raise HeadersTooLarge(f"more than {settings.max_headers} headers (MAX_HEADERS)")
        found = FIELD.fullmatch(line)
        if found is None:
            raise MalformedRequest("a header line must be NAME: VALUE, on one line")
        name, value = (part.decode("latin-1") for part in found.groups())
        head.fields.append((name.lower(), value.rstrip(" \t")))
    _check_once(head)
    _check_host(head)
    _check_length(head, settings)


def _check_once(head: Head) -> None:
    names = [name for name, _ in head.fields]
    for name in _ONCE:
        if names.count(name) > 1:
            raise MalformedRequest(f"{name.title()}: given more than once", param=name.title())


def _check_host(head: Head) -> None:
    host = head.get("host")
    if host is None and head.version == "HTTP/1.1":
        raise MalformedRequest("Host: is required", param="Host")
    for each in (host, head.host):
        if not _HOST.fullmatch(each or ""):
            raise MalformedRequest("Host: not the name of a host", param="Host")


def _check_length(head: Head, settings: Settings) -> None:
    coding, length = head.get("transfer-encoding"), head.get("content-length")
    if coding is not None:
        if length is not None:
            raise MalformedRequest("Content-Length and Transfer-Encoding exclude each other")
        if coding.lower() != "chunked" or head.version == "HTTP/1.0":
            raise MalformedRequest(
                "Transfer-Encoding: must be chunked, in HTTP/1.1", param="Transfer-Encoding"
            )
    if length is not None and not _LENGTH.fullmatch(length):
        raise MalformedRequest("Content-Length: must be a number", param="Content-Length")
    if head.expects_continue and (head.get("expect") or "").lower() != "100-continue":
        raise ExpectationFailed("Expect: can only be 100-continue", param="Expect")
    if length is not None and int(length) > settings.max_body_bytes:
        raise PayloadTooLarge(
            f"the body is larger than {settings.max_body_bytes} bytes (MAX_BODY_BYTES)"
        )
