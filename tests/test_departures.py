"""Clients that leave (FR41), on real sockets; the stub model takes a step when it is told to, so
"in prefill" and "decoding" are exact."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import gevent
import pytest
from numpy.typing import NDArray
from openai import OpenAI

from app import http
from app.answer import Answer
from app.config import Settings
from app.departure import Departure
from app.fields import SamplingFields
from app.sequence import FinishReason, Sequence, StepPlan
from app.served import Ask, Served

from .engines import stub_answer
from .services import CODEC, SETTINGS, StubService, events, running, still_clock, until
from .wire import WAYS, Client, listening

NUM_ROWS = 4
CONTEXT = 4096
LONG = "abcdefgh" * 3  # in three chunks


class Steps:
    """The stub's `change`: a step ends when it is allowed to."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._are_free = False

    def __call__(self, plan: StepPlan, logits: NDArray[Any]) -> None:
        if not self._are_free:
            assert self._permits.acquire(timeout=60)

    def allow(self, number: int) -> None:
        self._permits.release(number)

    def set_free(self) -> None:
        self._are_free = True
        self._permits.release()


class WatchedService(StubService):
    """Remembers its answers."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        super().__init__(SETTINGS, max_model_len=CONTEXT, max_batch_size=NUM_ROWS)

    def prepare(self, settings: Settings) -> Served:
        served = super().prepare(settings)
        submit = served.submit

        def remember(fields: SamplingFields, ask: Ask) -> Answer:
            self.answers.append(submit(fields, ask))
            return self.answers[-1]

        served.submit = remember  # type: ignore[method-assign]
        return served

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"phi_serve_{name}", labels) or 0.0

    @property
    def num_aborted(self) -> float:
        return self.count("request_success_total", finish_reason="abort")

    @property
    def plans(self) -> list[StepPlan]:
        return self.stub.plans


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[WatchedService, Any]]:
    with running(WatchedService()) as service, listening(service) as server:
        yield service, server


@pytest.fixture(autouse=True)
def no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a client has left is not noticed by a write that fails, however late that would be."""
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 3600)


@pytest.fixture
def port(shared: tuple[WatchedService, Any]) -> int:
    return int(shared[1].server_port)


@pytest.fixture
def steps(shared: tuple[WatchedService, Any]) -> Iterator[Steps]:
    """Behind it everything is free again: no connection and no sequence anywhere, and all rows run
    at once."""
    service, server = shared
    service.stub.change = steps = Steps()
    service.plans.clear()
    service.answers.clear()
    yield steps
    steps.set_free()
    until(service.is_idle)
    service.plans.clear()
    service.answers.clear()
    service.stub.change = last = Steps()
    with Client(server.server_port) as client:
        client.send(prompt="a", n=NUM_ROWS, max_tokens=NUM_ROWS + 1)
        until(lambda: service.answers)
        last.set_free()
        assert client.read()[0] == 200
    assert max(len(plan.decode) for plan in service.plans) == NUM_ROWS
    until(lambda: service.is_idle() and len(server.pool) == 0)


@pytest.fixture
def service(shared: tuple[WatchedService, Any], steps: Steps) -> WatchedService:
    return shared[0]


def sequences(service: WatchedService, number: int) -> list[Sequence]:
    return [completion.sequence for completion in service.answers[number].completions]


def has_ended(service: WatchedService, number: int = 0) -> bool:
    """For the engine, by its next step."""
    return all(s.ended_by is FinishReason.ABORT for s in sequences(service, number))


def run_to_prefill(client: Client, service: WatchedService, steps: Steps, **body: Any) -> None:
    client.send(prompt=LONG, **body)
    steps.allow(1)
    until(lambda: len(service.plans) == 2)


def run_to_decode(client: Client, service: WatchedService, steps: Steps, **body: Any) -> None:
    client.send(prompt="a", **body)
    steps.allow(3)
    until(lambda: len(service.plans) == 4)
    if body.get("stream"):
        client.read_until(b"data:")


PHASES = {"prefill": run_to_prefill, "decode": run_to_decode}


def statuses(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = (re.search(r"\b(499|200)\b", record.getMessage()) for record in caplog.records)
    return [found[1] for found in told if found]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", WAYS)
def test_client_that_leaves_frees_its_rows_within_the_step(
    service: WatchedService,
    port: int,
    steps: Steps,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    way: str,
    phase: str,
    stream: bool,
) -> None:
    caplog.set_level("INFO", "app")
    aborted = service.num_aborted
    with Client(port) as client:
        PHASES[phase](client, service, steps, max_tokens=50, stream=stream)
        num_plans = len(service.plans)
        WAYS[way](client)
        until(lambda: has_ended(service))
        steps.set_free()
        until(service.is_idle)
    assert len(service.plans) == num_plans
    assert service.num_aborted == aborted + 1
    until(lambda: "499" in statuses(caplog))
    assert [record for record in caplog.records if record.levelname != "INFO"] == []
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_client_that_leaves_the_queue_is_never_run(
    service: WatchedService, port: int, steps: Steps, way: str, stream: bool
) -> None:
    with Client(port) as resident, Client(port) as client:
        resident.send(prompt="a", n=NUM_ROWS, max_tokens=20)
        until(lambda: len(service.answers) == 1)
        steps.allow(NUM_ROWS)
        until(lambda: len(service.plans) == NUM_ROWS + 1)
        client.send(prompt="b", max_tokens=50, stream=stream)
        until(lambda: len(service.answers) == 2)
        steps.allow(2)  # the one that runs, and the first that knows of it
        until(lambda: service.count("num_requests_waiting") == 1)
        WAYS[way](client)
        until(lambda: has_ended(service, 1))
        steps.set_free()
        assert resident.read()[0] == 200
        until(service.is_idle)
    read = {tuple(plan.prefill.token_ids) for plan in service.plans if plan.prefill}
    assert read == {tuple(CODEC.encode("a"))}


def test_client_that_leaves_ends_all_its_choices(
    service: WatchedService, port: int, steps: Steps
) -> None:
    """The last is still in the queue."""
    aborted = service.num_aborted
    with Client(port) as client:
        run_to_decode(client, service, steps, n=NUM_ROWS + 1, max_tokens=50)
    until(lambda: has_ended(service))
    steps.set_free()
    until(service.is_idle)
    assert len(service.plans) == 4
    assert service.num_aborted == aborted + NUM_ROWS + 1


def test_half_closed_connection_is_shut_at_once(
    service: WatchedService, port: int, steps: Steps
) -> None:
    with Client(port) as client:
        run_to_prefill(client, service, steps)
        client.half_close()
        assert client.is_shut()


# --- connections that go on -----------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Departure]:
    """Whose sockets were looked at."""
    looks: list[Departure] = []
    look = Departure._look

    def counted(departure: Departure) -> None:
        looks.append(departure)
        look(departure)

    monkeypatch.setattr(Departure, "_look", counted)
    return looks


def test_connection_is_used_again_and_watched_only_while_a_request_runs(
    service: WatchedService, port: int, steps: Steps, looks: list[Departure]
) -> None:
    steps.set_free()
    aborted = service.num_aborted
    with Client(port) as client:
        for _ in range(5):
            client.send(prompt="a", max_tokens=3)
            assert client.read()[0] == 200
            client.send(prompt="a", max_tokens=3, stream=True)
            assert client.read()[0] == 200
        assert len(looks) == 10  # each when its watch began
    until(service.is_idle)
    assert service.num_aborted == aborted


def test_pipelined_request_is_served_after_the_first(
    service: WatchedService, port: int, steps: Steps, looks: list[Departure]
) -> None:
    with Client(port) as client:
        run_to_decode(client, service, steps, max_tokens=5)
        client.send(prompt="b", max_tokens=6)
        until(lambda: len(looks) == 2)  # when the watch began, and at the bytes
        for _ in range(20):  # turns of the hub
            gevent.sleep(0.001)
        assert len(looks) == 2  # else it spins
        steps.set_free()
        told = [events(b"data: " + client.read()[1])[0] for _ in range(2)]
    assert [answer["usage"]["completion_tokens"] for answer in told] == [5, 6]


@pytest.mark.parametrize("way", WAYS)
def test_client_that_leaves_behind_a_pipelined_request_is_noticed(
    service: WatchedService, port: int, steps: Steps, looks: list[Departure], way: str
) -> None:
    with Client(port) as client:
        run_to_decode(client, service, steps, max_tokens=50)
        client.send(prompt="b", max_tokens=6)
        until(lambda: len(looks) == 2)  # the bytes come first
        WAYS[way](client)
        until(lambda: has_ended(service))
        steps.set_free()
        until(service.is_idle)
    assert len(service.plans) == 4


def test_two_hundred_clients_that_leave_cost_no_descriptor(
    service: WatchedService, port: int, steps: Steps
) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    ways = list(WAYS.values())
    for start in range(0, 200, 50):
        clients = [Client(port) for _ in range(50)]
        for number, client in enumerate(clients):
            client.send(prompt="a", max_tokens=50, stream=number % 2 == 0)
        until(lambda: len(service.answers) == start + 50)  # noqa: B023  # called at once
        for number, client in enumerate(clients):
            ways[number % 3](client)
        until(lambda: all(has_ended(service, number) for number in range(len(service.answers))))
        for client in clients:
            client.close()
    steps.set_free()
    until(lambda: num_open() == before)


# --- before there is a sequence -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part", "body"),
    [
        ("codec", "encode", {"prompt": "a" * 10_000}),
        ("grammars", "regex", {"prompt": "a", "regex": "a+"}),
    ],
)
def test_nothing_is_submitted_for_a_client_that_left_meanwhile(
    service: WatchedService,
    port: int,
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    part: str,
    body: dict[str, Any],
) -> None:
    """Its prompt was being tokenized, or its grammar compiled, on another thread."""
    caplog.set_level("INFO", "app")
    begun, go_on = threading.Event(), threading.Event()
    owner = getattr(service.current.model, name)
    real = getattr(owner, part)

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, part, slow)
    with Client(port) as client:
        client.send(**body)
        until(begun.is_set)
        client.half_close()
        assert client.is_shut()
        go_on.set()
        until(lambda: "499" in statuses(caplog))
    assert service.answers == []


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/tokenize"])
def test_request_of_a_client_that_left_before_it_was_read_is_not_submitted(
    service: WatchedService, port: int, steps: Steps, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level("INFO", "app")
    with Client(port) as client:
        client.send(path, prompt="a")
        client.half_close()
        until(lambda: "499" in statuses(caplog))
    assert service.answers == []


# --- clients that do not read ---------------------------------------------------------------------


def run_until_full(client: Client, service: WatchedService, steps: Steps, **body: Any) -> None:
    """The client reads nothing, and the server can send nothing more; or its time was over before,
    on a machine that is busy."""
    client.send(prompt="a", max_tokens=4000, stream=True, logprobs=5, **body)
    num_allowed = 400
    steps.allow(num_allowed)
    until(lambda: service.answers)
    (sequence,) = sequences(service, 0)
    until(lambda: len(service.plans) == num_allowed + 1 or sequence.ended_by)
    until(lambda: service.answers[0].completions[0].num_tokens > 0 or sequence.ended_by)
    assert service.answers[0].completions[0].num_tokens < num_allowed


def test_deadline_ends_a_stream_that_nobody_reads(
    service: WatchedService, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = still_clock(monkeypatch)
    with listening(service) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with Client(server.server_port, receive_buffer=4096) as client:
            run_until_full(client, service, steps, timeout_ms=100)
            (sequence,) = sequences(service, 0)
            assert sequence.ended_by is None
            clock.now += 1
            until(lambda: sequence.ended_by is FinishReason.TIMEOUT)
            num_plans = len(service.plans)
            steps.set_free()
            until(service.is_idle)
            assert len(service.plans) - num_plans <= 1  # that had begun
            last = events(client.read()[1])[-1]
    assert last["finish_reason"] == "timeout"
    assert last["usage"]["completion_tokens"] == len(sequence.output_ids)


@pytest.mark.parametrize("way", WAYS)
def test_client_that_leaves_a_stream_that_it_does_not_read_is_noticed(
    service: WatchedService, steps: Steps, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    with listening(service) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with Client(server.server_port, receive_buffer=4096) as client:
            run_until_full(client, service, steps)
            WAYS[way](client)
            until(lambda: has_ended(service))
            until(lambda: len(server.pool) == 0)
    assert caplog.records == []


def test_connection_that_tcp_gives_up_ends_its_request(
    service: WatchedService,
    steps: Steps,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By TCP_USER_TIMEOUT: nothing of what was sent has been taken for so long."""
    with listening(service, tcp_user_timeout_ms=50) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with Client(server.server_port, receive_buffer=4096) as client:
            run_until_full(client, service, steps)
            until(lambda: has_ended(service))
            until(lambda: len(server.pool) == 0)
    assert caplog.records == []
    assert "Traceback" not in capfd.readouterr().err


# --- comments -------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, no_comments: None) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.01)


def test_stream_is_kept_alive_in_the_queue_and_in_prefill(
    service: WatchedService, port: int, steps: Steps, impatient: None
) -> None:
    with Client(port) as client:
        client.send(prompt=LONG, max_tokens=2, stream=True)
        head = client.read_until(b": keep-alive\n\n")
        client.read_until(b": keep-alive\n\n")
        steps.set_free()
        rest = client.read_until(b"usage")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"data: " in rest


@pytest.mark.parametrize("num_shown", [0, 2])
def test_stream_that_holds_its_text_back_is_kept_alive(
    service: WatchedService, port: int, steps: Steps, impatient: None, num_shown: int
) -> None:
    """Its tokens could become a stop string: before its first event, and between two."""
    pieces = [CODEC.detokenizer().feed([id_]) for id_ in stub_answer(CODEC.encode("a"), 8)]
    text = "".join(pieces)
    stop = text[len("".join(pieces[:num_shown])) :] + "and never this"
    with Client(port) as client:
        client.send(prompt="a", max_tokens=9, stream=True, stop=stop)
        steps.allow(8)
        until(lambda: len(service.plans) == 9)
        head = client.read_until(b": keep-alive\n\n")
        steps.set_free()
        rest = client.read_until(b"usage")
    assert (b"data:" in head) == (num_shown > 0)
    said = re.findall(rb'"text":("(?:[^"\\]|\\.)*")', head + rest)
    assert "".join(map(json.loads, said)).startswith(text)


def test_failure_behind_a_comment_is_an_event(
    service: WatchedService,
    port: int,
    steps: Steps,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = still_clock(monkeypatch)
    with Client(port) as client:
        client.send(prompt="a", max_tokens=2, stream=True, timeout_ms=20)
        received = client.read_until(b": keep-alive\n\n")
        clock.now += 1
        received += client.read_until(b"deadline_exceeded")
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b'data: {"error":' in received


def test_client_that_leaves_behind_a_comment_is_noticed(
    service: WatchedService, port: int, steps: Steps, impatient: None
) -> None:
    with Client(port) as client:
        client.send(prompt="a", max_tokens=2, stream=True)
        client.read_until(b": keep-alive\n\n")
    until(lambda: has_ended(service))


def test_openai_client_passes_over_comments(
    service: WatchedService,
    port: int,
    steps: Steps,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask() -> str:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model="stub", prompt="a", max_tokens=4, temperature=0, stream=True
        )
        with client, stream:
            first.wait(60)
            return "".join(chunk.choices[0].text for chunk in stream)

    first, comments = threading.Event(), []
    keep_alive = http.keep_alive
    monkeypatch.setattr(
        http, "keep_alive", lambda answer: comments.append(answer) or keep_alive(answer)
    )
    asked = gevent.get_hub().threadpool.spawn(ask)
    until(lambda: len(comments) > 2)
    first.set()
    steps.set_free()
    text = asked.get()
    with Client(port) as client:
        client.send(prompt="a", max_tokens=4, temperature=0)
        assert events(b"data: " + client.read()[1])[0]["text"] == text
