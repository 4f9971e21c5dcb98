"""API keys and their limits over real sockets: who is let in, and when a place is given back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent
import pytest

from app.api import create_app
from app.edge import Edge
from app.guard import _LEASE, Guard
from app.key_ring import KeyRing
from app.quota import Limits, Quotas
from app.routes import ROUTES, is_open

from .services import SETTINGS, StubService, hold_until, running, until
from .sockets import GET, LAST_GET, Client, Reply, post, serving, serving_of

SECRET = "sk-do-not-tell"
KEY = b"Authorization: Bearer sk-do-not-tell"
ASK = b'{"prompt": "abc", "max_tokens": 5, "ignore_eos": true}'
LONG = b'{"prompt": "abc", "max_tokens": 50, "ignore_eos": true%s}'
STREAM = LONG % b', "stream": true'


def keys_file(path: Path, **limits: int) -> Path:
    path.write_text(json.dumps({"keys": [{"name": "ann", "secret": SECRET, **limits}]}))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with serving(api_keys_file=keys_file(tmp_path_factory.mktemp("keys") / "keys.json")) as server:
        yield server


@contextmanager
def limited(folder: Path, **limits: int) -> Iterator[tuple[StubService, Edge]]:
    """A server with one key, of these limits."""
    path = keys_file(folder / "keys.json", **limits)
    with (
        gevent.Timeout(250),
        running(StubService(replace(SETTINGS, api_keys_file=path))) as service,
        serving_of(service) as server,
    ):
        yield service, server


def answer(server: Edge, request_: bytes) -> Reply:
    with Client(server) as client:
        return client.send(request_).read()


def get(path: str, *lines: bytes, method: bytes = b"GET") -> bytes:
    return b"\r\n".join(
        [method + b" " + path.encode() + b" HTTP/1.1", b"Host: x", *lines, b"", b""]
    )


# --- who is let in --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        *(
            None,
            b"Authorization: Bearer",
            b"Authorization: Bearer ",
            b"Authorization: Bearer wrong",
        ),
        *(b"Authorization: sk-do-not-tell", b"Authorization: Basic sk-do-not-tell"),
        *(KEY[:-1], KEY + b"x", KEY + b" x", KEY.upper(), b"X-Api-Key: sk-do-not-tell"),
        *(b"Authorization: Bearer \xff\xfe",),
    ],
)
def test_request_without_a_known_key_is_a_401(server: Edge, header: bytes | None) -> None:
    reply = answer(server, post(ASK, *([header] if header else []), path=b"/generate"))
    assert (reply.status, reply.code) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "bearer"  # the reader lowers it
    assert set(json.loads(reply.body)["error"]) == {"message", "type", "code", "param"}
    assert SECRET.encode() not in reply.body


@pytest.mark.parametrize("header", [KEY, KEY.replace(b"Bearer", b"bearer"), KEY + b" "])
def test_request_with_its_key_is_answered(server: Edge, header: bytes) -> None:
    assert answer(server, post(ASK, header, path=b"/generate")).status == 200


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_routes_need_a_key_but_those_of_health_metrics_and_docs(server: Edge, route: Any) -> None:
    path = route.path.replace("{name}", "stub")
    request_ = post(b"{}", path=path.encode()) if route.method == "POST" else get(path)
    is_free = path.startswith("/health/") or path in ("/metrics", "/docs", "/openapi.json")
    if path.startswith("/admin/"):  # has a key of its own
        assert answer(server, request_).code == "admin_off"
        assert is_open(path)
        return
    assert (answer(server, request_).status == 401) == (not is_free) == (401 in route.statuses)
    assert is_open(path) == is_free


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *(("/", 200), ("/nope", 401), ("/health", 401), ("/health/nope", 404), ("/metrics/", 401)),
        *(("//generate", 401), ("/health/%2e%2e/info", 404), ("/health/../info", 404)),
        *(("/page/nope", 404), ("/page/../info", 404), ("/page", 401)),
        *(("/v1/models/%2fhealth%2f", 401), ("/admin/model", 403), ("/administrator", 401)),
    ],
)
def test_no_other_path_gets_past_the_key(server: Edge, path: str, status: int) -> None:
    assert answer(server, get(path)).status == status


def test_every_method_needs_the_key_but_options_which_no_route_takes(server: Edge) -> None:
    for method, status in ((b"HEAD", 401), (b"PUT", 401), (b"DELETE", 401), (b"OPTIONS", 405)):
        with Client(server) as client:
            request_ = get("/info", b"Connection: close", method=method)
            assert client.send(request_).read_to_end().startswith(b"HTTP/1.1 %d " % status)


def test_refusal_keeps_the_connection_if_the_body_is_there_and_waits_for_none(
    server: Edge,
) -> None:
    with Client(server) as client:
        client.send(post(ASK, path=b"/generate") + post(ASK, KEY, path=b"/generate"))
        assert [client.read().status for _ in range(2)] == [401, 200]
    with Client(server) as client:
        reply = client.send(post(ASK, path=b"/generate")[:-1]).only_reply()
        assert (reply.status, reply.headers["connection"]) == (401, "close")
    with Client(server) as client:
        announced = post(ASK, b"Expect: 100-continue", path=b"/generate").removesuffix(ASK)
        assert client.send(announced).only_reply().status == 401


def test_log_has_the_keys_name_and_no_secret(
    server: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    answer(server, post(ASK, KEY, path=b"/generate"))
    answer(server, post(ASK, KEY + b"x", path=b"/generate"))

    def lines() -> list[Any]:
        return [record.msg for record in caplog.records if record.name == "app.access"]

    until(lambda: len(lines()) == 2)
    assert [(line["status"], line.get("owner")) for line in lines()] == [(200, "ann"), (401, None)]
    assert lines()[1]["error"] == "invalid_api_key"
    assert SECRET not in caplog.text
    assert SECRET not in repr(SETTINGS)


def test_engine_hears_whose_the_request_is(tmp_path: Path) -> None:
    with limited(tmp_path) as (service, server):
        answer(server, post(ASK, KEY, path=b"/generate"))
        owners = {sequence.owner for plan in service.stub.plans for sequence in plan.sampled}
    assert "ann" in owners


def test_server_without_keys_takes_any() -> None:
    with serving() as server:
        for lines in ((), (KEY,)):
            assert answer(server, post(ASK, *lines, path=b"/generate")).status == 200


# --- how much -------------------------------------------------------------------------------------


def test_spent_requests_are_a_429_that_says_until_when(tmp_path: Path) -> None:
    now = 0.0
    with limited(tmp_path, requests_per_minute=2) as (service, _):
        ring = KeyRing((), tmp_path / "keys.json")
        service.guard = Guard(ring, Quotas(lambda: now))
        with serving_of(service) as server:
            assert answer(server, post(b"{}", KEY, path=b"/generate")).status == 400  # counts
            now = 20.0
            assert answer(server, post(ASK, KEY, path=b"/generate")).status == 200
            refused = answer(server, post(ASK, KEY, path=b"/tokenize"))
            assert answer(server, get("/v1/models", KEY)).status == 200  # not work
            now = 60.0
            assert answer(server, post(ASK, KEY, path=b"/generate")).status == 200
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "40"
    error = json.loads(refused.body)["error"]
    assert "requests_per_minute: this key's limit of 2 " in error["message"]
    assert error["type"] == "rate_limit_error"


@pytest.mark.parametrize("body", [ASK, ASK.replace(b"}", b', "stream": true, "n": 1}')])
def test_tokens_that_are_charged_are_those_of_the_usage(tmp_path: Path, body: bytes) -> None:
    """Three of the prompt and five of the answer: one less lets in one more."""
    for limit, status in ((8, 429), (9, 200)):
        with limited(tmp_path, tokens_per_minute=limit) as (service, _):
            service.guard = Guard(KeyRing((), tmp_path / "keys.json"), Quotas(lambda: 7.0))
            with serving_of(service) as server, Client(server) as client:
                client.send(post(body, KEY, b"Connection: close", path=b"/generate")).read_to_end()
                refused = answer(server, post(ASK, KEY, path=b"/generate"))
        assert refused.status == status
        if status == 429:
            assert refused.headers["retry-after"] == "60"
            assert "tokens_per_minute: this key's limit of 8 " in refused.body.decode()


def test_new_limits_of_the_file_count_at_once(tmp_path: Path) -> None:
    with limited(tmp_path) as (service, server):
        keeper = gevent.spawn(service.guard.keep, lambda _: gevent.sleep(0.01))
        assert answer(server, post(ASK, KEY, path=b"/generate")).status == 200
        keys_file(tmp_path / "keys.json", requests_per_minute=1)
        until(lambda: answer(server, post(ASK, KEY, path=b"/generate")).status == 429)
        keys_file(tmp_path / "keys.json", requests_per_minute=1000)
        until(lambda: answer(server, post(ASK, KEY, path=b"/generate")).status == 200)
        keeper.kill()


def test_nothing_that_fails_ends_the_keeping_of_keys_and_quotas(tmp_path: Path) -> None:
    done: list[str] = []

    class Ring(KeyRing):
        def refresh(self) -> None:
            done.append("refresh")
            if len(done) > 1:
                raise RuntimeError("the disk is gone")

    class FailingQuotas(Quotas):
        def settle(self) -> None:
            done.append("settle")
            raise RuntimeError("it cannot count")

    def sleep(_: float) -> None:
        if len(done) > 5:
            raise gevent.GreenletExit

    ring = Ring((), keys_file(tmp_path / "keys.json"))
    with pytest.raises(gevent.GreenletExit):
        Guard(ring, FailingQuotas()).keep(sleep)
    assert done == ["refresh", *["refresh", "settle"] * 3]


def test_tokens_that_nobody_reads_are_charged_as_they_are_generated(tmp_path: Path) -> None:
    with limited(tmp_path, tokens_per_minute=1000) as (service, _):
        client = create_app(service).test_client()
        headers = {"Authorization": f"Bearer {SECRET}"}
        body = {"prompt": "abc", "max_tokens": 50, "ignore_eos": True, "stream": True}
        response = client.post("/generate", json=body, headers=headers, buffered=False)
        next(iter(response.response))  # and no more
        until(lambda: not service.bridge.has_streams)
        service.guard._quotas.settle()
        assert service.guard._quotas._accounts["ann"].tokens.used == 3 + 50
        response.close()
        assert service.guard._quotas._accounts["ann"].tokens.used == 3 + 50


def test_request_that_finds_no_room_does_not_count(tmp_path: Path) -> None:
    path = keys_file(tmp_path / "keys.json", requests_per_minute=3)
    settings = replace(SETTINGS, api_keys_file=path, max_queued_requests=1)
    go_on = threading.Event()
    with (
        gevent.Timeout(250),
        running(StubService(settings, max_batch_size=1)) as service,
        serving_of(service) as server,
    ):
        service.stub.plans.clear()
        service.stub.change = lambda plan, logits: hold_until(go_on.is_set)
        request_ = post(ASK, KEY, path=b"/generate")
        jobs = [gevent.spawn(answer, server, request_)]
        until(lambda: service.stub.plans)
        jobs.append(gevent.spawn(answer, server, request_))
        until(lambda: service.bridge.backlog.num_sequences == 1)
        assert [answer(server, request_).code for _ in range(4)] == ["overloaded"] * 4
        go_on.set()
        assert [job.get().status for job in jobs] == [200] * 2
        assert answer(server, request_).status == 200
        assert answer(server, request_).code == "rate_limit_exceeded"


def test_request_that_comes_while_the_model_loads_does_not_count(tmp_path: Path) -> None:
    path = keys_file(tmp_path / "keys.json", requests_per_minute=1)
    service = StubService(replace(SETTINGS, api_keys_file=path))
    with gevent.Timeout(250), serving_of(service) as server:
        request_ = post(ASK, KEY, path=b"/generate")
        assert [answer(server, request_).code for _ in range(3)] == ["not_ready"] * 3
        service.drain.is_closed = True
        assert [answer(server, request_).code for _ in range(3)] == ["draining"] * 3


# --- when a place is given back -------------------------------------------------------------------

Way = Callable[[StubService, Client, threading.Event], object]


def plain(service: StubService, client: Client, go_on: threading.Event) -> None:
    client.send(post(LONG % b"", KEY, path=b"/generate"))
    go_on.set()
    assert client.read().status == 200


def streamed(service: StubService, client: Client, go_on: threading.Event) -> None:
    client.send(post(STREAM, KEY, b"Connection: close", path=b"/generate"))
    go_on.set()
    assert b'"finish_reason"' in client.read_to_end()


def leaves(body: bytes, leave: Callable[[Client], object]) -> Way:
    def run(service: StubService, client: Client, go_on: threading.Event) -> None:
        client.send(post(body, KEY, path=b"/generate"))
        until(lambda: service.drain.num_open)
        leave(client)

    return run


def fails(body: bytes) -> Way:
    """In the model: a status, or an event of the stream."""

    def run(service: StubService, client: Client, go_on: threading.Event) -> None:
        client.send(post(body, KEY, b"Connection: close", path=b"/generate"))
        until(lambda: service.drain.num_open)
        service.stub.change = fail_once
        go_on.set()
        assert b"model_failure" in client.read_to_end()

    def fail_once(plan: Any, logits: Any) -> None:
        raise RuntimeError("the device is lost")

    return run


def refused(status: int, request_: bytes) -> Way:
    def run(service: StubService, client: Client, go_on: threading.Event) -> None:
        assert client.send(request_).read().status == status

    return run


def silence(service: StubService, client: Client, go_on: threading.Event) -> None:
    """Here alone a limit of time is waited for: elsewhere it could end what is slow."""
    with serving_of(service, read_timeout_ms=50) as hurried:
        sent = post(ASK, KEY, path=b"/generate")[:-1]
        with Client.early(hurried, sent) as silent:
            assert silent.read().status == 408


WAYS: dict[str, Way] = {
    "whole answer": plain,
    "whole stream": streamed,
    "close": leaves(LONG % b"", lambda client: client.socket.close()),
    "close of a stream": leaves(STREAM, lambda client: client.socket.close()),
    "reset": leaves(LONG % b"", Client.reset),
    "reset of a stream": leaves(STREAM, Client.reset),
    "half-close": leaves(STREAM, Client.end),
    "failure": fails(LONG % b""),
    "failure of a stream": fails(STREAM),
    "bad body": refused(400, post(b"{}", KEY, path=b"/generate")),
    "no JSON": refused(400, post(b"{", KEY, path=b"/generate")),
    "too large": refused(413, post(b" " * 100_001, KEY, path=b"/generate")),
    "other type": refused(415, post(ASK, KEY, path=b"/generate").replace(b"/json", b"/xml")),
    "no path": refused(404, post(ASK, KEY, path=b"/nope")),
    "no method": refused(405, post(ASK, KEY, path=b"/info")),
    "silence": silence,
    "deadline": refused(504, post(LONG % b', "timeout_ms": 20', KEY, path=b"/generate")),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_place_of_a_request_comes_back_however_it_ends(tmp_path: Path, way: Way) -> None:
    go_on = threading.Event()
    path = keys_file(tmp_path / "keys.json", concurrent_requests=1)
    settings = replace(SETTINGS, api_keys_file=path)
    with (
        gevent.Timeout(250),
        running(StubService(settings)) as service,
        serving_of(service) as server,
    ):
        service.stub.change = lambda plan, logits: hold_until(go_on.is_set)
        with Client(server) as client:
            way(service, client, go_on)
            go_on.set()
            service.stub.change = lambda plan, logits: None
            until(lambda: answer(server, post(ASK, KEY, path=b"/generate")).status == 200)


class BrokenEnd(list[bytes]):
    def close(self) -> None:
        raise RuntimeError


@pytest.mark.parametrize("is_broken_at_once", [True, False])
def test_place_of_a_request_that_breaks_comes_back(is_broken_at_once: bool) -> None:
    quotas, limits = Quotas(), Limits(concurrent_requests=1)
    guard = Guard(KeyRing((), None), quotas)

    def broken(environ: dict[str, Any], start_response: Any) -> Any:
        environ[_LEASE] = quotas.admit("ann", limits)
        if is_broken_at_once:
            raise SystemExit
        return BrokenEnd()

    for _ in range(2):
        with suppress(SystemExit):
            guard.releasing(broken)({}, None).close()
    quotas.admit("ann", limits)


def test_place_is_held_while_the_request_runs(tmp_path: Path) -> None:
    go_on = threading.Event()
    with limited(tmp_path, concurrent_requests=2) as (service, server):
        service.stub.change = lambda plan, logits: hold_until(go_on.is_set)
        with Client(server) as first, Client(server) as second:
            for client in (first, second):
                client.send(post(STREAM, KEY, b"Connection: close", path=b"/generate"))
            until(lambda: service.drain.num_open == 2)
            reply = answer(server, post(ASK, KEY, path=b"/generate"))
            assert (reply.status, reply.headers["retry-after"]) == (429, "1")
            assert "concurrent_requests: this key's limit of 2 " in reply.body.decode()
            go_on.set()
            first.read_to_end()
            until(lambda: answer(server, post(ASK, KEY, path=b"/generate")).status == 200)


def test_health_is_answered_whoever_has_used_up_what(tmp_path: Path) -> None:
    with limited(tmp_path, requests_per_minute=1) as (_, server):
        for _ in range(2):
            reply = answer(server, post(ASK, KEY, path=b"/tokenize"))
        assert reply.status == 429
        assert answer(server, GET).status == answer(server, LAST_GET).status == 200
