"""A request's body as the app reads it: whole and within its limits, or an error.

It knows where the body ends, and so whether another request may follow on the connection.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import MalformedRequest, PayloadTooLarge, UnreadableBody
from .framing import FIELD, Head, Reader

if TYPE_CHECKING:
    from .config import Settings

# What a chunk may say besides its bytes; nothing of it is used.
_MAX_CHUNK_LINE = 256
_MAX_EXTENSIONS = 4096  # of all chunks together
_MAX_TRAILERS = 4096
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})([ \t]*;[\t\x20-\x7e\x80-\xff]*)?")


class Body(io.RawIOBase):
    """Reading raises UnreadableBody for broken framing, PayloadTooLarge, SlowClient, and OSError if
    the connection is broken. Nothing may be read behind an error."""

    def __init__(
        self, reader: Reader, head: Head, settings: Settings, send_continue: Callable[[], None]
    ) -> None:
        self._reader = reader
        self._settings = settings
        self._is_chunked = head.is_chunked
        self._left = head.length or 0  # of the body, or of the chunk
        self._num_bytes = 0
        self._num_extra = 0
        self._send_continue = send_continue if head.expects_continue else None
        self._ends_at: float | None = None
        self.is_whole = not self._is_chunked and not self._left

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if self._is_chunked and not self._left and not self.is_whole:
            self._begin_chunk()
        if self.is_whole:
            return 0
        if not len(self._reader):
            self._fill()
        taken = self._reader.take(min(len(target), self._left))
        target[: len(taken)] = taken
        self._left -= len(taken)
        self._num_bytes += len(taken)
        if not self._left:
            if self._is_chunked:
                self._end_chunk()
            else:
                self.is_whole = True
        return len(taken)

    def skip_what_has_come(self) -> None:
        """For an answer that needs no body: it need not end the connection if all is here."""
        if not self._is_chunked and self._ends_at is None and self._left <= len(self._reader):
            self._reader.take(self._left)
            self.is_whole = True

    def _begin_chunk(self) -> None:
        found = _CHUNK.fullmatch(self._line(_MAX_CHUNK_LINE))
        if found is None:
            raise UnreadableBody("the body cannot be read: a chunk's size is not a number")
        self._num_extra += len(found[2] or b"")
        if self._num_extra > _MAX_EXTENSIONS:
            raise UnreadableBody("the body cannot be read: its chunks have long extensions")
        self._left = int(found[1], 16)
        most = self._settings.max_body_bytes
        if self._num_bytes + self._left > most:
            raise PayloadTooLarge(f"the body is larger than {most} bytes (MAX_BODY_BYTES)")
        if not self._left:
            self._read_trailers()
            self.is_whole = True

    def _end_chunk(self) -> None:
        if self._line(0):
            raise UnreadableBody("the body cannot be read: a chunk is longer than its size")

    def _read_trailers(self) -> None:
        left = _MAX_TRAILERS
        while line := self._line(left):
            left = max(left - len(line) - 2, 0)
            if not FIELD.fullmatch(line):
                raise UnreadableBody("the body cannot be read: a trailer is not NAME: VALUE")

    def _line(self, most: int) -> bytes:
        def refuse() -> NoReturn:
            raise UnreadableBody("the body cannot be read: its chunks are not well-formed")

        try:
            # Its bytes may lie there already; a deadline counts where they do not.
            return self._reader.line(most, self._wait_until(), refuse)
        except MalformedRequest as error:
            raise UnreadableBody(f"the body cannot be read: {error.message}") from None

    def _fill(self) -> None:
        if not self._reader.fill(self._wait_until()):
            raise UnreadableBody("the body cannot be read: it ends early")

    def _wait_until(self) -> float:
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + self._settings.body_timeout_ms / 1000
            if self._send_continue is not None and not len(self._reader):
                self._send_continue()
        return min(self._ends_at, now + self._settings.read_timeout_ms / 1000)
