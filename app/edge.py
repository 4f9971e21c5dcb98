"""The socket side of HTTP: gevent's WSGI server, with small answers sent at once."""

from __future__ import annotations

import errno
import logging
import socket
from typing import Any

from flask import Flask
from gevent.pool import Pool
from gevent.pywsgi import WSGIHandler, WSGIServer

from .departure import ENVIRON_KEY, Departure

log = logging.getLogger(__name__)


class _NoDelayHandler(WSGIHandler):  # type: ignore[misc]  # gevent.pywsgi has no types
    def handle(self) -> None:
        # pywsgi writes head and body apart: Nagle's algorithm would hold the second one back for
        # the client's delayed ACK, 44 ms per answer on a kept connection.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().handle()

    # A vanished peer, found by TCP's own time-out, is no error of ours.
    ignored_socket_errors = (*WSGIHandler.ignored_socket_errors, errno.ETIMEDOUT)

    def get_environ(self) -> Any:
        environ = super().get_environ()
        environ[ENVIRON_KEY] = Departure(self.socket)
        return environ

    def run_application(self) -> None:
        with self.environ[ENVIRON_KEY]:
            super().run_application()


def bind(app: Flask, host: str, port: int) -> Any:
    """A server that listens already; it accepts once started. Raises OSError."""
    server = WSGIServer(
        (host, port),
        app,
        handler_class=_NoDelayHandler,
        spawn=Pool(),  # unbounded; with it, stop() lets running answers end
        log=None,  # the app logs its requests
        error_log=log,
    )
    server.init_socket()
    return server
