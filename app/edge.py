"""The server: a listening socket, a bound on connections, and an end that loses no answer."""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flask import Flask
from gevent.pool import Pool
from gevent.pywsgi import WSGIServer

from .connection import Connection

if TYPE_CHECKING:
    from .config import Settings
    from .tracing import Tracing

log = logging.getLogger(__name__)

_BACKLOG = 1024
_SPARE_FILES = 256  # beside connections: the model's files, libraries, the log


class Edge(WSGIServer):  # type: ignore[misc]  # gevent.pywsgi has no types
    """The server. `count` hears the code of every error that the app does not answer itself,
    `tracing` of every request that has ended."""

    is_stopping = False

    def __init__(
        self,
        app: Flask,
        settings: Settings,
        count: Callable[[str], None],
        tracing: Tracing | None = None,
    ) -> None:
        self.settings = settings
        self.count = count
        self.tracing = tracing
        self.max_connections = _max_connections(settings)
        self.open: set[Connection] = set()
        super().__init__(
            (settings.host, settings.port),
            app,
            backlog=_BACKLOG,
            # With a pool, stop() lets running answers end. A full one accepts nothing.
            spawn=Pool(self.max_connections + settings.reserved_connections),
            log=None,
            error_log=log,
            environ={"SERVER_NAME": settings.host},  # or it would ask the DNS for one
        )

    @property
    def url(self) -> str:
        host = f"[{self.server_host}]" if ":" in self.server_host else self.server_host
        return f"http://{host}:{self.server_port}"

    def handle(self, sock: Any, address: Any) -> None:
        connection = Connection(sock, address, self, len(self.open) >= self.max_connections)
        self.open.add(connection)
        try:
            connection.handle()
        finally:
            self.open.discard(connection)

    def stop(self, timeout: float | None = None) -> None:
        """Connections that lie idle are closed at once, others behind their answer, or after
        `timeout` seconds in the middle of it."""
        self.is_stopping = True
        for connection in [each for each in self.open if each.is_idle]:
            with suppress(OSError):  # it has left by itself
                connection.socket.shutdown(socket.SHUT_RD)
        super().stop(timeout)


def bind(
    app: Flask,
    settings: Settings,
    count: Callable[[str], None] = lambda code: None,
    tracing: Tracing | None = None,
) -> Edge:
    """A server that listens already; it accepts once started. Raises OSError."""
    server = Edge(app, settings, count, tracing)
    server.init_socket()
    return server


def bind_ops(app: Flask, settings: Settings, count: Callable[[str], None]) -> Edge | None:
    """Likewise on the port of their own that health and metrics may have, for as many connections
    as are reserved for them; None if they have none."""
    if not settings.ops_port:
        return None
    own = replace(
        settings,
        host=settings.ops_host or settings.host,
        port=settings.ops_port,
        max_connections=settings.reserved_connections,
    )
    return bind(app, own, count)


def _max_connections(settings: Settings) -> int:
    """As many as the process may open files for, if those are fewer than is set."""
    most = settings.max_connections
    others = settings.reserved_connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < most + others:
        soft = min(most + others, hard) if hard != resource.RLIM_INFINITY else most + others
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= most + others:
        return most
    fewer = max(1, soft - others)
    log.warning(
        "MAX_CONNECTIONS=%d: only %d, as the process may open %d files (ulimit -n)",
        *(most, fewer, soft),
    )
    return fewer
