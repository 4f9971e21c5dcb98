"""The socket side of HTTP: gevent's WSGI server, with small answers sent at once."""

from __future__ import annotations

import logging
import socket
from typing import Any

from flask import Flask
from gevent.pool import Pool
from gevent.pywsgi import WSGIHandler, WSGIServer

log = logging.getLogger(__name__)


class _NoDelayHandler(WSGIHandler):  # type: ignore[misc]  # gevent.pywsgi has no types
    def handle(self) -> None:
        # pywsgi writes head and body apart: Nagle's algorithm would hold the second one back for
        # the client's delayed ACK, 44 ms per answer on a kept connection.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().handle()


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
