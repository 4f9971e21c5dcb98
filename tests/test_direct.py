"""Streams whose events the hub writes itself: the same bytes as through WSGI, whatever the client
and its socket do. The stub model takes a step when it is told to, so every event is on its own."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from gevent import socket as gevent_socket

from app import direct, http
from app.api import create_app
from app.connection import NotTaken
from app.detokenizer import Detokenizer
from app.direct import Outlet, Regular
from app.edge import Edge, bind
from app.errors import ClientLeft

from .services import events, running, until
from .sockets import GET, post, serving_of
from .test_departures import Steps, WatchedService
from .test_failures import fail_at
from .wire import Client, listening

NUM_TOKENS = 12
BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a stop string": {"stop": ["never said"]},
    "log-probabilities": {"logprobs": 2},
    "two choices": {"n": 2, "temperature": 1.0, "seed": 3},
    "usage": {"stream_options": {"include_usage": True}},
}
PATHS = ["/generate", "/v1/completions"]


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[WatchedService, Edge]]:
    with running(WatchedService()) as service, serving_of(service) as server:
        yield service, server


@pytest.fixture(autouse=True)
def no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """None between the events, however slow these are."""
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 3600)


@pytest.fixture
def port(shared: tuple[WatchedService, Edge]) -> int:
    return int(shared[1].server_port)


@pytest.fixture
def steps(shared: tuple[WatchedService, Edge]) -> Iterator[Steps]:
    """Behind it nothing runs."""
    service, server = shared
    service.answers.clear()
    service.stub.change = steps = Steps()
    yield steps
    steps.set_free()
    until(lambda: service.is_idle() and not server.open)


@pytest.fixture
def service(shared: tuple[WatchedService, Edge], steps: Steps) -> WatchedService:
    return shared[0]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was written directly, whole or not."""
    frames: list[bytes] = []
    send = Outlet.send

    def noting(self: Outlet, frame: bytes) -> bool:
        frames.append(frame)
        return send(self, frame)

    monkeypatch.setattr(Outlet, "send", noting)
    return frames


def step_by_step(service: WatchedService, steps: Steps, number: int) -> None:
    """Each step's tokens are delivered before the next one runs."""
    for _ in range(number):
        num_taken = taken(service)
        steps.allow(1)
        until(lambda before=num_taken: taken(service) > before)  # type: ignore[misc]


def taken(service: WatchedService) -> int:
    return sum(completion.num_tokens for completion in service.answers[0].completions)


def is_over(service: WatchedService) -> bool:
    return all(each.finish_reason is not None for each in service.answers[0].completions)


def said(body: bytes) -> list[dict[str, Any]]:
    """Its events, without what is never the same."""
    found = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    for event in found:
        for name in ("id", "created", "timings", "request_id"):
            event.pop(name, None)
    return found


def texts(body: bytes) -> dict[int, str]:
    """Of each choice, joined."""
    joined: dict[int, str] = {}
    for event in said(body):
        [choice] = event.get("choices", [event])
        joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return joined


def read_stream(
    service: WatchedService, steps: Steps, path: str, body: dict[str, Any], is_direct: bool
) -> bytes:
    service.answers.clear()
    app = create_app(service)

    def through_wsgi(environ: dict[str, Any], start_response: Any) -> Any:
        if not is_direct:
            del environ[direct.ENVIRON_KEY]
        return app(environ, start_response)

    server = bind(through_wsgi, service.settings)  # type: ignore[arg-type]
    server.start()
    with gevent.Timeout(60), Client(server.server_port) as client:
        base = {"prompt": "a", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
        client.send(path, stream=True, **base | body)
        until(lambda: service.answers)
        # The prompts of several choices are read one after the other.
        step_by_step(service, steps, NUM_TOKENS + len(service.answers[0].completions) - 1)
        status, received = client.read()
    server.stop(timeout=1)
    assert status == 200
    return received


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", PATHS)
def test_stream_is_the_one_that_goes_through_wsgi(
    service: WatchedService,
    steps: Steps,
    sent: list[bytes],
    name: str,
    path: str,
) -> None:
    if name == "usage" and path == "/generate":
        pytest.skip("it has no such field")
    through_wsgi = read_stream(service, steps, path, BODIES[name], is_direct=False)
    assert sent == []
    directly = read_stream(service, steps, path, BODIES[name], is_direct=True)
    if name == "two choices":  # what comes of both in one step may find the first one waiting
        assert texts(directly) == texts(through_wsgi)
    else:
        assert said(directly) == said(through_wsgi)
    assert directly.endswith(b"[DONE]\n\n") == (path != "/generate")
    # All but the first, and the last of each choice; half a character gives no event.
    assert len(sent) > NUM_TOKENS // 2
    assert b"".join(sent) in directly or name == "two choices"


@pytest.mark.parametrize("path", [*PATHS, "/v1/chat/completions"])
def test_stream_is_not_buffered_by_proxies(
    service: WatchedService, port: int, steps: Steps, path: str
) -> None:
    """FR40."""
    steps.set_free()
    asked = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    body = json.dumps(asked | {"max_tokens": 2, "stream": True}).encode()
    with gevent_socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(post(body, b"Connection: close", path=path.encode()))
        received = b"".join(iter(lambda: client.recv(65536), b""))
    head = received.partition(b"\r\n\r\n")[0].lower()
    assert b"\r\ncontent-type: text/event-stream" in head
    assert b"\r\ncache-control: no-cache\r\n" in head
    assert b"\r\nx-accel-buffering: no\r\n" in head


def test_http_1_0_gets_the_events_as_they_are(
    service: WatchedService,
    port: int,
    steps: Steps,
    sent: list[bytes],
) -> None:
    body = b'{"prompt": "a", "max_tokens": 12, "ignore_eos": true, "stream": true}'
    with gevent_socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(post(body, path=b"/generate").replace(b"HTTP/1.1", b"HTTP/1.0"))
        until(lambda: service.answers)
        step_by_step(service, steps, 12)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    told = events(rest)  # nothing else stands between them
    assert told[-1]["usage"]["completion_tokens"] == 12
    assert len(sent) > 6
    assert b"".join(sent) in rest


def test_next_request_on_the_connection_is_answered_behind_the_stream(
    service: WatchedService,
    port: int,
    steps: Steps,
    sent: list[bytes],
) -> None:
    steps.set_free()
    body = b'{"prompt": "a", "max_tokens": 9, "ignore_eos": true, "stream": true}'
    with Client(port) as client:
        client.socket.sendall(post(body, path=b"/generate") + GET)
        _, first = client.read()
        status, second = client.read()
    assert events(first)[-1]["finish_reason"] == "length"
    assert (status, json.loads(second)) == (200, {"status": "live"})


# --- a client that does not read ------------------------------------------------------------------


def stall(service: WatchedService, steps: Steps, client: Client, **body: Any) -> None:
    """Until a direct write was not taken."""
    client.send(prompt="a", max_tokens=600, ignore_eos=True, stream=True, logprobs=5, **body)
    until(lambda: service.answers)
    outlet = outlet_of(service)
    while not outlet.rest:
        steps.allow(1)
        gevent.sleep(0.001)


def outlet_of(service: WatchedService) -> Outlet:
    outlet = service.answers[0]._outlet
    assert outlet is not None
    return outlet


@pytest.mark.parametrize("size", [4096, 16384])
def test_client_that_stalls_and_goes_on_misses_nothing(
    service: WatchedService,
    steps: Steps,
    sent: list[bytes],
    size: int,
) -> None:
    with listening(service) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        with Client(server.server_port, receive_buffer=size) as client:
            stall(service, steps, client)
            num_before = len(sent)
            steps.set_free()
            _, body = client.read()
            told = events(body)
            client.send(prompt="a", max_tokens=600, ignore_eos=True)
            plain = json.loads(client.read()[1])
    assert "".join(event["text"] for event in told) == plain["text"]
    ids = [token["id"] for event in told for token in event["logprobs"]]
    assert ids == service.answers[0].completions[0].sequence.output_ids
    assert len(sent) >= num_before


def test_client_that_takes_nothing_for_the_write_timeout_ends_its_request(
    service: WatchedService,
    steps: Steps,
) -> None:
    with listening(service, write_timeout_ms=50) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with Client(server.server_port, receive_buffer=4096) as client:
            stall(service, steps, client)
            while not is_over(service):  # the kernel may yet have found room for that rest
                steps.allow(1)
                gevent.sleep(0.001)
            until(lambda: len(server.pool) == 0)
            received = client.read_until(b"}\n\n")
            while part := client.socket.recv(65536):
                received += part
    # Not a byte behind what was cut, least of all a chunk of length 0.
    assert not received.endswith(b"0\r\n\r\n")
    assert b"error" not in received


# --- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 6])
def test_failure_of_a_text_is_an_event_behind_what_came_before(
    service: WatchedService,
    port: int,
    steps: Steps,
    sent: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    at: int,
) -> None:
    fail_at((Detokenizer, "feed"), at, monkeypatch)
    with Client(port) as client:
        client.send(prompt="a", max_tokens=50, ignore_eos=True, stream=True, logprobs=0)
        until(lambda: service.answers)
        step_by_step(service, steps, at)
        steps.set_free()
        status, body = client.read()
    *before, last = events(body)
    assert (status, last["error"]["code"]) == (200, "internal_error")
    assert [len(event["logprobs"]) for event in before] == [1] * at
    assert len(sent) == at - 1


def test_failure_of_a_step_is_an_event_behind_what_came_before(
    service: WatchedService,
    port: int,
    steps: Steps,
) -> None:
    def fail(plan: Any, logits: Any) -> None:
        raise RuntimeError("secret")

    with Client(port) as client:
        client.send(prompt="a", max_tokens=50, ignore_eos=True, stream=True, logprobs=0)
        until(lambda: service.answers)
        step_by_step(service, steps, 5)
        service.stub.change = fail
        steps.allow(1)
        body = client.read()[1]
        service.stub.change = steps
    *before, last = events(body)
    assert last["error"]["code"] == "model_failure"
    assert 5 <= sum(len(event["logprobs"]) for event in before) <= 6


def test_deadline_ends_a_stream_that_is_written_directly(
    service: WatchedService,
    port: int,
    steps: Steps,
    sent: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=time.monotonic(), monotonic=lambda: clock.now)
    monkeypatch.setattr("app.answer.time", clock)
    with Client(port) as client:
        client.send(
            prompt="a", max_tokens=50, ignore_eos=True, stream=True, logprobs=0, timeout_ms=60_000
        )
        until(lambda: service.answers)
        step_by_step(service, steps, 4)
        clock.now += 61
        service.answers[0]._look_at_deadline()  # as its timer does
        told = events(client.read()[1])
    assert told[-1]["finish_reason"] == "timeout"
    assert sum(len(event["logprobs"]) for event in told) == 4
    assert len(sent) == 3


def test_stop_string_ends_a_stream_in_front_of_it(
    service: WatchedService,
    port: int,
    steps: Steps,
    sent: list[bytes],
) -> None:
    steps.set_free()
    with Client(port) as client:
        client.send(prompt="a", max_tokens=40, ignore_eos=True)
        text = json.loads(client.read()[1])["text"]
        stop = re.findall(r"[!-~]{2}", text[4:])[-1]
        service.answers.clear()
        service.stub.change = steps = Steps()
        client.send(prompt="a", max_tokens=40, ignore_eos=True, stream=True, stop=stop)
        until(lambda: service.answers)
        while not is_over(service):
            step_by_step(service, steps, 1)
        told = events(client.read()[1])
        steps.set_free()
    assert "".join(event["text"] for event in told) == text[: text.index(stop)]
    assert told[-1]["finish_reason"] == "stop"
    assert sent


def test_stream_counts_as_open_until_its_end(
    service: WatchedService,
    port: int,
    steps: Steps,
    sent: list[bytes],
) -> None:
    with Client(port) as client:
        client.send(prompt="a", max_tokens=8, ignore_eos=True, stream=True)
        until(lambda: service.answers)
        step_by_step(service, steps, 7)
        assert sent
        assert service.drain.num_open == 1
        steps.set_free()
        client.read()
        until(lambda: service.drain.num_open == 0)


def test_access_log_counts_what_was_written_directly(
    service: WatchedService,
    port: int,
    steps: Steps,
    sent: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "app.access")
    body = b'{"prompt": "a", "max_tokens": 9, "ignore_eos": true, "stream": true}'
    with gevent_socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(post(body, b"Connection: close", path=b"/generate"))
        until(lambda: service.answers)
        step_by_step(service, steps, 9)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    until(lambda: caplog.records)
    assert sent
    assert caplog.records[0].msg["bytes"] == len(received)  # type: ignore[call-overload]


# --- comments -------------------------------------------------------------------------------------


def test_comments_that_a_client_does_not_take_neither_mix_nor_get_lost(
    service: WatchedService,
    steps: Steps,
    sent: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.001)
    monkeypatch.setattr(http, "keep_alive", lambda answer: b": " + b"x" * 3000 + b"\n\n")
    with listening(service) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with Client(server.server_port, receive_buffer=4096) as client:
            client.send(prompt="a", max_tokens=5, ignore_eos=True, stream=True, logprobs=0)
            until(lambda: service.answers and outlet_of(service).rest)
            steps.set_free()
            _, body = client.read()
    parts = body.split(b"\n\n")
    comments = [part for part in parts if part.startswith(b":")]
    told = events(b"\n".join(part for part in parts if not part.startswith(b":")))
    assert {len(comment) for comment in comments} == {3002}
    assert sum(len(event["logprobs"]) for event in told) == 5


# --- the parts ------------------------------------------------------------------------------------


class PlainHandler:
    """Half a connection that nobody reads yet."""

    headers_sent = True
    response_use_chunked = True
    response_length = 0
    has_left = False

    def __init__(self) -> None:
        self.socket, self.peer = gevent_socket.socketpair()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def __enter__(self) -> PlainHandler:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.peer.close()

    def _sendall(self, data: bytes) -> None:
        if self.has_left:
            raise NotTaken("it has left")
        self.socket.sendall(data)
        self.response_length += len(data)


def test_write_that_is_not_taken_leaves_a_rest_and_nothing_passes_it() -> None:
    with PlainHandler() as handler:
        outlet = Outlet(handler)
        num_sent = 0
        while outlet.send(b"x" * 100):
            num_sent += 1
        assert outlet.rest
        assert not outlet.is_open
        assert not outlet.send(b"y")
        reader = gevent.spawn(lambda: b"".join(iter(lambda: handler.peer.recv(65536), b"")))
        outlet.flush()
        assert outlet.is_open
        handler.socket.shutdown(socket.SHUT_WR)
        received = reader.get(timeout=60)
    assert received == (b"64\r\n" + b"x" * 100 + b"\r\n") * (num_sent + 1)
    assert outlet.num_sent + handler.response_length == 106 * (num_sent + 1)


def test_nothing_is_written_directly_to_a_client_that_has_left() -> None:
    with PlainHandler() as handler:
        outlet = Outlet(handler)
        assert outlet.is_open
        handler.has_left = True
        assert not outlet.is_open


def test_rest_for_a_client_that_has_left_is_its_leaving() -> None:
    with PlainHandler() as handler:
        handler.peer.close()
        outlet = Outlet(handler)
        assert not outlet.send(b"x")
        handler.has_left = True
        with pytest.raises(ClientLeft):
            outlet.flush()
        assert not outlet.is_open


def test_regular_calls_come_in_turn_and_end_with_their_context() -> None:
    regular, calls = Regular(), []
    with regular.calling(lambda: calls.append("slow"), 0.02):
        with regular.calling(lambda: calls.append("fast"), 0.005):
            until(lambda: calls.count("slow") >= 2 and calls.count("fast") > calls.count("slow"))
        num_fast, num_slow = calls.count("fast"), calls.count("slow")
        until(lambda: calls.count("slow") >= num_slow + 2)
        assert calls.count("fast") == num_fast
    until(lambda: regular._timer is None)
    assert regular._due == []


def test_regular_call_does_not_wait_for_one_that_is_due_later() -> None:
    regular, calls = Regular(), []
    with (
        regular.calling(lambda: calls.append("late"), 3600),
        regular.calling(lambda: calls.append("soon"), 0.001),
    ):
        until(lambda: len(calls) > 2)
    assert "late" not in calls


def test_regular_call_that_raises_is_logged_and_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    regular, calls = Regular(), []

    def fail() -> None:
        calls.append("bad")
        raise RuntimeError("a call of its own")

    with regular.calling(fail, 0.001), regular.calling(lambda: calls.append("good"), 0.001):
        until(lambda: calls.count("good") > 2 and calls.count("bad") > 2)
    assert "a call of its own" in caplog.text


def test_many_regular_calls_let_the_hub_turn_between() -> None:
    """A thousand are due at once."""
    calls: list[int] = []
    turns: list[int] = []

    def turn() -> None:
        while len(calls) < 1000:
            turns.append(len(calls))
            gevent.sleep(0)

    regular = Regular()
    with gevent.Timeout(60):
        contexts = [regular.calling(lambda n=n: calls.append(n), 0.05) for n in range(1000)]  # type: ignore[misc]
        for context in contexts:
            context.__enter__()
        turn()
        for context in contexts:
            context.__exit__(None, None, None)
    assert calls[:1000] == list(range(1000))
    seen = [*sorted(set(turns)), 1000]  # it turns between any two batches
    assert max(b - a for a, b in pairwise(seen)) <= direct._MOST_AT_ONCE
