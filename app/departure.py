"""Notices that the client of a connection has left. WSGI tells nobody: a stream hears of it when a
write fails, a request that waits never.

A connection that can be read while its request runs has been closed, half-closed or reset, or the
next request lies on it already. Belongs to the hub, and knows nothing of requests.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import gevent

from .errors import ClientLeft

ENVIRON_KEY = "phi_serve.departure"

_READ = 1  # libev's EV_READ
_SWEEP_SECONDS = 0.1
_ESTABLISHED = 1  # of tcpi_state, the first byte of TCP_INFO (tcp_states.h)


class Departure:
    """Of one request's client. Leave the context before the socket is closed: its number may be
    another connection's right after.

    `connection` is gevent's socket; None is a client that cannot leave, a test's. A client that
    shuts down its sending side has left, too: the connection is shut down then, so that a write
    that waits for it to read fails at once.
    """

    def __init__(self, connection: Any = None) -> None:
        self.has_left = False
        self._connection = connection
        self._watcher: Any = None
        self._on_leave: Callable[[], None] | None = None

    def __enter__(self) -> Departure:
        return self

    def __exit__(self, *_: object) -> None:
        """Its request has ended: who still works for it need not, and is told so."""
        self._stop()
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None:
            on_leave()

    def forget(self) -> None:
        """Nobody is to be called any more: the answer need not be kept for it."""
        self._on_leave = None

    def watch(self) -> None:
        """From now on. The request's body has been read: what can be read now is behind it."""
        if self._connection is None:
            return
        self._start(gevent.get_hub().loop.io(self._connection.fileno(), _READ), self._look)
        self._look()

    def check(self) -> None:
        """Raises ClientLeft if it has."""
        if self.has_left:
            raise ClientLeft("the client has left")

    def call(self, on_leave: Callable[[], None]) -> None:
        """`on_leave` is called when the client leaves, at once if it has. It must not wait."""
        self._on_leave = on_leave
        if self.has_left:
            on_leave()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, whoever waits in this greenlet is woken with ClientLeft when the client leaves;
        nobody else is called meanwhile."""
        waits = gevent.getcurrent()
        self.call(lambda: waits.throw(ClientLeft("the client has left")))
        try:
            yield
        finally:
            self.forget()

    def _look(self) -> None:
        try:
            # Of the socket below gevent's, which would wait.
            next_byte = self._connection._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:  # reset, or the peer has vanished
            next_byte = b""
        if not next_byte:
            self._leave()
        else:
            self._sweep_from_now_on()

    def _sweep_from_now_on(self) -> None:
        """A pipelined request hides the connection's end, and its bytes would wake the hub for
        ever."""
        self._stop()
        if hasattr(socket, "TCP_INFO"):  # Linux
            timer = gevent.get_hub().loop.timer(_SWEEP_SECONDS, _SWEEP_SECONDS)
            self._start(timer, self._sweep)

    def _sweep(self) -> None:
        state = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state != _ESTABLISHED:  # CLOSE_WAIT or CLOSE
            self._leave()

    def _leave(self) -> None:
        self.has_left = True
        self._stop()
        with suppress(OSError):  # reset: there is nothing to shut down
            self._connection._sock.shutdown(socket.SHUT_RDWR)
        if self._on_leave is not None:
            self._on_leave()

    def _start(self, watcher: Any, callback: Callable[[], None]) -> None:
        self._watcher = watcher
        watcher.start(callback)

    def _stop(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
