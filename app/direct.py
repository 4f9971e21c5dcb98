"""Writes to a client's socket that the hub makes itself, without waking the stream's greenlet: to
wake one costs several times what the write does.

The greenlet sleeps meanwhile. It begins an answer, ends it, and takes over when the client does not
take a write at once. Knows bytes and times only. Belongs to the hub.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import gevent

from .errors import ClientLeft

log = logging.getLogger(__name__)

ENVIRON_KEY = "phi_serve.direct"

_MOST_AT_ONCE = 200  # comments, then the hub turns
_TURN_SECONDS = 0.02  # what is due by then waits for the others: a turn of its own costs more


class Handler(Protocol):
    """What an outlet needs of a pywsgi handler."""

    socket: Any  # gevent's
    headers_sent: bool
    response_use_chunked: bool
    has_left: bool

    def _sendall(self, data: bytes) -> None: ...


class Outlet:
    """The socket of one answer, past WSGI.

    Invariant: while `rest` is not empty, nothing is sent but by `flush`. `num_sent` are the bytes
    that `send` has sent.
    """

    __slots__ = ("_handler", "_is_chunked", "_write", "num_sent", "rest")

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._write: Callable[[bytes], int] | None = None
        self._is_chunked = True
        self.rest = b""  # of what was sent, and not taken
        self.num_sent = 0

    @property
    def is_open(self) -> bool:
        """WSGI has sent the headers; what follows may be written directly."""
        return self._handler.headers_sent and not (self.rest or self._handler.has_left)

    def send(self, frame: bytes) -> bool:
        """One write. False if it was not taken, or not all of it: `flush` sends the rest, and until
        then nothing else may be sent. Never waits."""
        if self.rest:
            return False
        write = self._write or self._begin()
        data = b"%x\r\n%b\r\n" % (len(frame), frame) if self._is_chunked else frame
        try:
            num_sent = write(data)
        except OSError:  # it is full, or broken: `flush` will tell
            num_sent = 0
        self.num_sent += num_sent
        if num_sent == len(data):
            return True
        self.rest = data[num_sent:]
        return False

    def _begin(self) -> Callable[[bytes], int]:
        # As pywsgi does it; it has decided so with the headers.
        self._is_chunked = self._handler.response_use_chunked
        # The socket below gevent's, which would wait.
        write: Callable[[bytes], int] = self._handler.socket._sock.send
        self._write = write
        return write

    def flush(self) -> None:
        """Waits until the client has taken the rest, if there is one. For the answer's greenlet.

        Raises ClientLeft if it does not in time; WSGI's own writes fail from then on.
        """
        if not self.rest:
            return
        try:
            self._handler._sendall(self.rest)
        except OSError as error:
            raise ClientLeft(str(error)) from None
        self.rest = b""


class Regular:
    """Calls at regular times: one timer for all of them, so that thousands cost no greenlet each.

    A call must not wait; one that raises is no other's loss.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, _Call]] = []  # a heap
        self._numbers = itertools.count()  # of those that are due together, the first first
        self._timer: Any = None
        self._timer_due_at = 0.0

    @contextmanager
    def calling(self, function: Callable[[], object], seconds: float) -> Iterator[None]:
        """While it is entered, `function` is called every `seconds`."""
        call = _Call(function, seconds)
        self._add(call)
        self._set_timer()
        try:
            yield
        finally:
            call.function = None

    def _add(self, call: _Call) -> None:
        heapq.heappush(self._due, (self._clock() + call.seconds, next(self._numbers), call))

    def _set_timer(self, at_least: float = 0.0) -> None:
        if not self._due:
            return
        due_at = self._due[0][0]
        if self._timer is not None:
            if self._timer_due_at <= due_at:
                return
            self._timer.close()  # it was set for a later one
        self._timer_due_at = due_at
        self._timer = gevent.get_hub().loop.timer(max(at_least, due_at - self._clock()))
        self._timer.start(self._turn)

    def _turn(self) -> None:
        self._timer.close()
        self._timer = None
        now = self._clock()
        for _ in range(_MOST_AT_ONCE):
            if not self._due or self._due[0][0] > now:
                self._set_timer(_TURN_SECONDS)
                return
            _, _, call = heapq.heappop(self._due)
            if call.function is not None:
                self._add(call)
                _call(call.function)
        self._set_timer(0.001)


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        log.exception("a regular call failed")


class _Call:
    __slots__ = ("function", "seconds")

    def __init__(self, function: Callable[[], object], seconds: float) -> None:
        self.function: Callable[[], object] | None = function
        self.seconds = seconds
