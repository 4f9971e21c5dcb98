"""Health and metrics on a port of their own."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import gevent
import pytest

from app.api import create_app, create_ops_app
from app.edge import Edge, bind, bind_ops
from app.keys import read_pairs

from .services import SETTINGS, StubService, running, until
from .sockets import Client, Reply, post, serving_of

OPS = ("/health/live", "/health/ready", "/metrics")


def free_port() -> int:
    """Not of those that the kernel gives away: it would, before it is bound again."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as taken, suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


@contextmanager
def two_ports(**changes: Any) -> Iterator[tuple[StubService, Edge, Edge]]:
    settings = replace(SETTINGS, ops_port=free_port(), **changes)
    with gevent.Timeout(250), running(StubService(settings)) as service:
        ops = bind_ops(create_ops_app(service), settings, service.metrics.rejected)
        assert ops is not None
        ops.start()
        try:
            with serving_of(service) as server:
                yield service, server, ops
        finally:
            ops.stop(1)


def get(server: Edge, path: str) -> Reply:
    with Client(server) as client:
        return client.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()).read()


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[StubService, Edge, Edge]]:
    with two_ports(api_keys=read_pairs("ann:secret")) as ports:
        yield ports


@pytest.mark.parametrize("path", OPS)
def test_health_and_metrics_are_on_their_port_without_a_key_and_nowhere_else(
    ports: tuple[StubService, Edge, Edge], path: str
) -> None:
    service, server, ops = ports
    assert ops.server_port == service.settings.ops_port != server.server_port
    assert get(ops, path).status == 200
    assert get(server, path).status == 404


@pytest.mark.parametrize(
    "path", ["/", "/info", "/v1/models", "/docs", "/openapi.json", "/generate"]
)
def test_nothing_else_is_on_that_port(ports: tuple[StubService, Edge, Edge], path: str) -> None:
    _, _, ops = ports
    reply = get(ops, path)
    assert (reply.status, reply.code) == (404, "not_found")


def test_metrics_there_are_those_of_the_other_port(ports: tuple[StubService, Edge, Edge]) -> None:
    _, server, ops = ports
    before = get(ops, "/metrics").body
    with Client(server) as client:
        client.send(post(b"{}", b"Authorization: Bearer wrong")).read()
    assert b'requests_rejected_total{reason="invalid_api_key"} 0.0' in before
    assert b'requests_rejected_total{reason="invalid_api_key"} 1.0' in get(ops, "/metrics").body


def test_full_main_port_leaves_health_alone() -> None:
    with two_ports(max_connections=1, reserved_connections=1) as (_, server, ops), ExitStack() as s:
        for _ in range(3):
            s.enter_context(Client(server)).send(b"GET ")
        until(lambda: len(server.open) == 2)
        assert get(ops, "/health/live").status == 200


def test_drain_is_told_there_until_the_end() -> None:
    with two_ports() as (service, _, ops):
        service.drain.announced.set()
        reply = get(ops, "/health/ready")
        assert (reply.status, reply.code, reply.headers["connection"]) == (503, "draining", "close")
        assert get(ops, "/health/live").status == 200


def test_without_the_setting_there_is_no_second_port() -> None:
    service = StubService()
    assert bind_ops(create_ops_app(service), service.settings, print) is None


def test_url_of_an_ipv6_address_has_brackets() -> None:
    server = bind(create_app(StubService()), replace(SETTINGS, host="::1"))
    try:
        assert server.url == f"http://[::1]:{server.server_port}"
    finally:
        server.stop()


def test_host_is_that_of_the_main_port_unless_it_is_told() -> None:
    service = StubService(replace(SETTINGS, ops_port=free_port(), host="127.0.0.2"))
    for told, host in (("", "127.0.0.2"), ("127.0.0.1", "127.0.0.1")):
        settings = replace(service.settings, ops_host=told)
        server = bind_ops(create_ops_app(service), settings, print)
        assert server is not None
        assert server.server_host == host
        server.stop()
