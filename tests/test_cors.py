"""What a browser is told: nothing unless origins are set, then what its page may send and read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.edge import Edge
from app.keys import read_pairs

from .sockets import Client, Reply, post, serving

PAGE = "https://app.example"
BODY = b'{"prompt": "a"}'


def preflight(origin: str = PAGE, *lines: str, path: str = "/generate") -> bytes:
    head = [f"OPTIONS {path} HTTP/1.1", "Host: x", f"Origin: {origin}", *lines]
    return "\r\n".join([*head, "Access-Control-Request-Method: POST", "", ""]).encode()


def ask(origin: str = PAGE, *lines: bytes) -> bytes:
    return post(BODY, b"Origin: " + origin.encode(), *lines)


def answer(server: Edge, request: bytes) -> Reply:
    with Client(server) as client:
        return client.send(request).read()


def told(reply: Reply) -> dict[str, str]:
    return {n: v for n, v in reply.headers.items() if n.startswith("access-control-")}


@contextmanager
def open_to(*origins: str) -> Iterator[Edge]:
    with serving(cors_origins=origins, api_keys=read_pairs("ann:secret")) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Edge]:
    with open_to(PAGE, "http://localhost:3000") as server:
        yield server


def test_without_origins_nothing_is_said_and_options_is_no_method() -> None:
    with serving() as server:
        asked, asking = answer(server, ask()), answer(server, preflight())
    assert asked.status == 200
    assert (asking.status, asking.code, asking.headers["allow"]) == (
        *(405, "method_not_allowed"),
        "post",  # the reader lowers it
    )
    for reply in (asked, asking):
        assert told(reply) == {}
        assert "vary" not in reply.headers


@pytest.mark.parametrize("path", ["/generate", "/v1/models", "/nope"])
def test_preflight_carries_no_key_and_says_what_may_be_sent(server: Edge, path: str) -> None:
    reply = answer(server, preflight(path=path))
    assert (reply.status, reply.body) == (204, b"")
    assert told(reply) == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": "get, post",
        "access-control-allow-headers": "authorization, content-type, x-request-id, "
        "x-request-timeout",
        "access-control-max-age": "7200",
        "access-control-expose-headers": "x-request-id, retry-after",
    }
    assert reply.headers["vary"] == "origin"


def test_connection_goes_on_behind_a_preflight(server: Edge) -> None:
    with Client(server) as client:
        client.send(preflight() + ask(PAGE, b"Authorization: Bearer secret"))
        assert [client.read().status for _ in range(2)] == [204, 200]


def test_headers_of_openais_client_are_allowed_and_others_are_not(server: Edge) -> None:
    asked = "Access-Control-Request-Headers: authorization, x-stainless-os,X-Stainless-Lang, x-evil"
    allowed = told(answer(server, preflight(PAGE, asked)))["access-control-allow-headers"]
    assert allowed.endswith("x-request-timeout, x-stainless-os, x-stainless-lang")


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
@pytest.mark.parametrize("key", [b"Authorization: Bearer secret", b"Authorization: Bearer wrong"])
def test_page_of_an_origin_can_read_answers_and_errors(
    server: Edge, origin: str, key: bytes
) -> None:
    reply = answer(server, ask(origin, key))
    assert reply.status == (200 if key.endswith(b"secret") else 401)
    assert told(reply) == {
        "access-control-allow-origin": origin,
        "access-control-expose-headers": "x-request-id, retry-after",
    }
    assert reply.headers["vary"] == "origin"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://app.example.evil", "http://app.example", "null"]
)
def test_page_of_another_origin_is_told_nothing(server: Edge, origin: str) -> None:
    asked = answer(server, ask(origin, b"Authorization: Bearer secret"))
    asking = answer(server, preflight(origin))
    assert (asked.status, asking.status) == (200, 405)
    assert told(asked) == told(asking) == {}
    assert asked.headers["vary"] == "origin"  # caches must not give it to the page


def test_options_of_no_page_is_no_method_and_needs_no_key(server: Edge) -> None:
    asking = b"OPTIONS %s HTTP/1.1\r\nHost: x\r\n\r\n"
    assert answer(server, asking % b"/generate").status == 405
    assert answer(server, asking % b"/nowhere").status == 404


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([b"Expect: a-miracle"], 417),
        ([b"X-Long: " + b"a" * 40_000], 431),
        ([b"Content-Length: 3"], 400),  # twice
    ],
)
def test_page_can_read_what_the_socket_side_refuses(
    server: Edge, lines: list[bytes], status: int
) -> None:
    reply = answer(server, ask(PAGE, *lines))
    assert reply.status == status
    assert told(reply)["access-control-allow-origin"] == PAGE
    assert reply.headers["vary"] == "origin"
    assert told(answer(server, ask("https://evil.example", *lines))) == {}


def test_star_is_every_origin() -> None:
    with open_to("*") as server:
        for request in (preflight("https://any.example"), ask("https://any.example")):
            reply = answer(server, request)
            assert told(reply)["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in reply.headers


def test_request_of_no_page_is_told_nothing(server: Edge) -> None:
    assert told(answer(server, post(BODY, b"Authorization: Bearer secret"))) == {}
