"""The socket side, on a real gevent server in process."""

from __future__ import annotations

import socket
from typing import Any

import gevent
import pytest
from gevent import socket as gevent_socket
from gevent.pywsgi import WSGIHandler

from app.edge import bind


def plain_app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "2")])
    return [b"ok"]


def test_answers_are_not_held_back_for_a_delayed_ack(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[int] = []
    run_application = WSGIHandler.run_application

    def look(handler: WSGIHandler) -> None:
        options.append(handler.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        run_application(handler)

    monkeypatch.setattr(WSGIHandler, "run_application", look)
    server = bind(plain_app, "127.0.0.1", 0)  # type: ignore[arg-type]
    server.start()
    with gevent.Timeout(20):
        client = gevent_socket.create_connection(("127.0.0.1", server.server_port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b"".join(iter(lambda: client.recv(4096), b""))
        client.close()
        server.stop(timeout=1)
    assert received.endswith(b"ok")
    assert options == [1]
