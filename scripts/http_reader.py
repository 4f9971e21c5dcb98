"""An HTTP/1.1 answer read as its bytes arrive, and the events of a stream.

No sockets and no clock here: load_client.py feeds what it received. As little of HTTP as servers
of language models speak: a body by Content-Length, in chunks, or until the connection ends.
"""

import json
from typing import Any

MAX_HEAD_BYTES = 65536


class BadAnswer(Exception):
    """The bytes are not an HTTP answer, or it ended in its middle."""


def take_events(received: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Split received SSE bytes into the events of the finished lines, and the unfinished rest."""
    *lines, rest = received.split(b"\n")
    data = (line[5:].strip() for line in lines if line.startswith(b"data:"))
    return [json.loads(text) for text in data if text != b"[DONE]"], rest


class ResponseReader:
    """One answer. `is_done` once its body is whole; `keeps_alive` says if another may follow."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_done = False
        self._rest = b""
        self._left: int | None = None  # bytes of the body or chunk; None: until the end
        self._is_chunked = False

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def keeps_alive(self) -> bool:
        has_end = self._is_chunked or self._left is not None
        return has_end and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body that `data` has brought.

        Raises: BadAnswer
        """
        if not self.status:
            data = self._read_head(data)
            if not self.status:
                return b""
        try:
            return self._read_chunks(data) if self._is_chunked else self._read_plain(data)
        except ValueError as error:
            raise BadAnswer(f"bad chunk: {error}") from error

    def end(self) -> None:
        """The connection has ended.

        Raises: BadAnswer: too early
        """
        if not self.status or self._is_chunked or self._left is not None:
            raise BadAnswer("the connection ended before the answer did")
        self.is_done = True

    def _read_head(self, data: bytes) -> bytes:
        head, found, rest = (self._rest + data).partition(b"\r\n\r\n")
        if not found:
            if len(head) > MAX_HEAD_BYTES:
                raise BadAnswer("endless headers")
            self._rest = head
            return b""
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(maxsplit=2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            raise BadAnswer(f"no HTTP answer: {first[:80]!r}")
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.status, self._rest = int(words[1]), b""
        self._is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length")
        self._left = 0 if self._is_chunked else None if length is None else int(length)
        return rest

    def _read_plain(self, data: bytes) -> bytes:
        if self._left is not None:
            self._left -= len(data)
            self.is_done = self._left <= 0
        return data

    def _read_chunks(self, data: bytes) -> bytes:
        """`_left` counts the bytes of the open chunk with the line end behind it."""
        assert self._left is not None
        data = self._rest + data
        parts: list[bytes] = []
        at = 0
        while at < len(data):
            if self._left:
                part = data[at : at + self._left]
                # Of the last two bytes, the line end, any may be in this piece or the next.
                parts.append(part[: max(0, self._left - 2)])
                at, self._left = at + len(part), self._left - len(part)
                continue
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(data[at:line_end].partition(b";")[0], 16)
            if size == 0:  # an empty line ends it, behind trailers that nobody sends
                self.is_done = b"\r\n\r\n" in data[line_end:]
                break
            at, self._left = line_end + 2, size + 2
        self._rest = b"" if self.is_done else data[at:]
        return b"".join(parts)
