"""Health tells the truth (FR52): live is the hub, ready is progress. The model's faults are a
stub's; the hours that a hung one takes are a clock's that the test moves."""

from __future__ import annotations

import ctypes
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import gevent
import numpy as np
import pytest
from flask.testing import FlaskClient

from app.api import create_app
from app.config import read_settings
from app.pulse import Pulse
from app.sequence import StepPlan
from app.service import Service

from .conftest import TinyModel
from .services import StubService, hold_until, running, until
from .sockets import GET, Client, post, serving_of

LIMIT_SECONDS = 5


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def service(clock: SimpleNamespace) -> Iterator[StubService]:
    service = StubService()
    service.bridge.pulse = Pulse(LIMIT_SECONDS, lambda: clock.now)
    with running(service):
        yield service


@pytest.fixture
def client(service: StubService) -> FlaskClient:
    return create_app(service).test_client()


def why_not_ready(client: FlaskClient) -> str | None:
    """None if ready. The hub turns, so it is live in any case."""
    assert client.get("/health/live").status_code == 200
    response = client.get("/health/ready")
    if response.status_code == 200:
        return None
    assert response.status_code == 503
    assert response.get_json()["error"]["code"] == "not_ready"
    return str(response.get_json()["error"]["message"])


# --- FR52's four stubs ----------------------------------------------------------------------------


def test_model_that_blocks_is_not_ready_behind_the_limit_and_gets_no_requests(
    service: StubService, client: FlaskClient, clock: SimpleNamespace
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def block(plan: StepPlan, logits: object) -> None:
        entered.set()
        hold_until(go_on.is_set)

    service.stub.change = block
    job = gevent.spawn(client.post, "/generate", json={"prompt": "a", "max_tokens": 3})
    until(entered.is_set)
    clock.now += LIMIT_SECONDS
    assert why_not_ready(client) is None
    clock.now += 1
    assert why_not_ready(client) == "the model hangs: no progress for 6 s"
    refused = client.post("/generate", json={"prompt": "a"})
    assert (refused.status_code, refused.get_json()["error"]["code"]) == (503, "not_ready")
    go_on.set()
    assert job.get(timeout=60).get_json()["usage"]["completion_tokens"] == 3
    assert why_not_ready(client) is None


def test_who_is_refused_is_told_when_to_come_back_and_by_a_draining_server_not() -> None:
    service = StubService()
    client = create_app(service).test_client()
    loading = [client.get("/health/ready"), client.post("/generate", json={"prompt": "a"})]
    assert [response.status_code for response in loading] == [503, 503]
    assert [response.headers["Retry-After"] for response in loading] == ["5", "5"]
    with running(service):
        service.drain.announced.set()
        service.drain.is_closed = True
        for response in (client.get("/health/ready"), client.post("/generate", json={})):
            assert response.get_json()["error"]["code"] == "draining"
            assert "Retry-After" not in response.headers


def test_model_that_raises_each_step_is_not_ready(
    service: StubService, client: FlaskClient
) -> None:
    def fail(plan: StepPlan, logits: object) -> None:
        raise RuntimeError

    service.stub.change = fail
    for _ in range(2):
        assert client.post("/generate", json={"prompt": "a"}).status_code == 500
    assert why_not_ready(client) == "the last steps of the model have failed"


def test_engine_thread_that_dies_is_not_ready(service: StubService, client: FlaskClient) -> None:
    def die(plan: StepPlan, logits: object) -> None:
        raise SystemExit("killed")

    service.stub.change = die
    assert client.post("/generate", json={"prompt": "a"}).status_code == 500
    assert why_not_ready(client) == "the model is failed"
    assert service.bridge.ended.is_set()  # which ends the process


def busy_without_the_lock() -> None:
    """A native call, as a session's run is one: hashing long bytes releases Python's lock."""
    hashlib.sha512(bytes(4 << 20))


def busy_in_python() -> None:
    """It costs the hub its share, not its life."""
    sum(range(1000))


def busy_with_the_lock() -> None:
    """As ONNX Runtime holds it while it builds a session: nothing else of Python runs."""
    ctypes.PyDLL(None).usleep(50_000)


@pytest.mark.parametrize("busy", [busy_without_the_lock, busy_in_python, busy_with_the_lock])
def test_liveness_is_answered_while_a_step_is_busy_natively(
    service: StubService, busy: Callable[[], None]
) -> None:
    """FR36. The step ends behind its fifth answer: however slow the machine is, it is in the
    way all the time."""
    entered, is_enough = threading.Event(), threading.Event()

    def step(plan: StepPlan, logits: object) -> None:
        entered.set()
        give_up_at = time.monotonic() + 60
        while not is_enough.is_set() and time.monotonic() < give_up_at:
            busy()
        assert is_enough.is_set()

    service.stub.change = step
    with serving_of(service) as server, Client(server) as client, Client(server) as other:
        client.send(post(b'{"prompt": "a", "max_tokens": 2}', path=b"/generate"))
        until(entered.is_set)
        for _ in range(5):
            assert other.send(GET).read().status == 200
        is_enough.set()
        assert client.read().status == 200


def test_long_prefill_is_ready_as_long_as_its_chunks_come(
    service: StubService, client: FlaskClient, clock: SimpleNamespace
) -> None:
    """Seven chunks of nearly the limit each; nobody but they make progress."""
    seen: list[str | None] = []

    def read_slowly(plan: StepPlan, logits: object) -> None:
        clock.now += LIMIT_SECONDS - 0.5
        seen.append(service.bridge.why_not_ready)

    service.stub.change = read_slowly
    response = client.post("/generate", json={"prompt": "abcdefg " * 7, "max_tokens": 1})
    assert response.status_code == 200
    assert seen == [None] * 7
    assert why_not_ready(client) is None


# --- the engine turns, but nothing comes of it ----------------------------------------------------


def test_engine_that_turns_without_progress_is_not_ready(
    service: StubService, client: FlaskClient, clock: SimpleNamespace
) -> None:
    """A scheduler that never admits what waits."""
    engine: Any = service.bridge._engine
    has_free_row = engine._scheduler._has_free_row
    turns: list[float] = []

    def refuse() -> bool:
        turns.append(clock.now)
        return False

    engine._scheduler._has_free_row = refuse
    job = gevent.spawn(client.post, "/generate", json={"prompt": "a", "max_tokens": 2})
    until(lambda: engine._scheduler.num_waiting)
    clock.now += LIMIT_SECONDS + 1
    until(lambda: turns.count(clock.now) > 3)
    assert why_not_ready(client) == "the model hangs: no progress for 6 s"
    engine._scheduler._has_free_row = has_free_row
    assert job.get(timeout=60).status_code == 200
    assert why_not_ready(client) is None


def test_server_without_work_is_ready_however_long_nothing_has_come(
    service: StubService, client: FlaskClient, clock: SimpleNamespace
) -> None:
    assert client.post("/generate", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    clock.now += LIMIT_SECONDS + 1
    until(lambda: why_not_ready(client) is None)  # the last step's end is told before it rests


# --- idle -----------------------------------------------------------------------------------------


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.engine_thread._IDLE_TEST_SECONDS", 0.002)
    monkeypatch.setattr("app.engine_thread._RETEST_SECONDS", 0.002)


@pytest.mark.usefixtures("often")
def test_idle_model_that_fails_is_noticed_without_a_request(clock: SimpleNamespace) -> None:
    def fail(plan: StepPlan, logits: object) -> None:
        raise RuntimeError

    def spoil(plan: StepPlan, logits: Any) -> None:
        logits[:] = np.nan

    with running(StubService()) as service:
        client = create_app(service).test_client()
        for change in (fail, spoil):
            service.stub.change = change
            until(lambda: why_not_ready(client) is not None)
            assert why_not_ready(client) == "the last steps of the model have failed"
            service.stub.change = lambda plan, logits: None
            until(lambda: why_not_ready(client) is None)


@pytest.mark.usefixtures("often")
def test_idle_model_that_hangs_is_noticed_without_a_request(clock: SimpleNamespace) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def block(plan: StepPlan, logits: object) -> None:
        entered.set()
        hold_until(go_on.is_set)

    service = StubService()
    service.bridge.pulse = Pulse(LIMIT_SECONDS, lambda: clock.now)
    with running(service):
        client = create_app(service).test_client()
        service.stub.change = block
        until(entered.is_set)
        clock.now += LIMIT_SECONDS + 1
        assert why_not_ready(client) == "the model hangs: no progress for 6 s"
        go_on.set()
        until(lambda: why_not_ready(client) is None)


@pytest.mark.usefixtures("often")
def test_self_test_is_one_token_and_appears_in_no_metric() -> None:
    with running(StubService()) as service:
        until(lambda: len(service.stub.plans) > 10)
        for plan in service.stub.plans:
            assert plan.decode == []
            assert plan.prefill is not None and len(plan.prefill.token_ids) == 1
        for name in ("generation_tokens_total", "prompt_tokens_total", "batch_size_count"):
            assert service.registry.get_sample_value(f"phi_serve_{name}") == 0
        counts = service.registry.get_sample_value(
            "phi_serve_request_success_total", {"finish_reason": "length"}
        )
        assert counts == 0


@pytest.mark.usefixtures("often")
def test_request_in_the_middle_of_a_self_test_waits_for_one_step() -> None:
    entered, go_on = threading.Event(), threading.Event()
    with running(StubService()) as service:
        client = create_app(service).test_client()

        def block(plan: StepPlan, logits: object) -> None:
            if not entered.is_set():
                service.stub.plans.clear()
                entered.set()
                hold_until(go_on.is_set)

        service.stub.change = block
        until(entered.is_set)
        job = gevent.spawn(client.post, "/generate", json={"prompt": "abc", "max_tokens": 1})
        until(lambda: service.bridge._streams)
        go_on.set()
        assert job.get(timeout=60).status_code == 200
        prefill = service.stub.plans[0].prefill
        assert prefill is not None and prefill.sequence.request_id != "self-test"


# --- loading --------------------------------------------------------------------------------------


def test_load_tells_each_stage_and_how_long_it_takes(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(read_settings(["--model", str(tiny_llama.folder), "--threads", "1"]))
    told: list[str] = []
    enter = Pulse.enter

    def listen(pulse: Pulse, stage: str) -> None:
        enter(pulse, stage)
        told.append(service.bridge.why_not_ready or "")

    monkeypatch.setattr(Pulse, "enter", listen)
    client = create_app(service).test_client()
    told_first = why_not_ready(client) or ""
    assert re.fullmatch(r"the model is loading: starting for \d+ s, \d+ s in all", told_first)
    with running(service):
        assert why_not_ready(client) is None
    stages = [message.removeprefix("the model is loading: ").split(" for ")[0] for message in told]
    assert stages == [
        "reading the graph",
        "importing libraries",
        "reading the tokenizer",
        "loading weights",
        "probing",
        "preparing to serve",
        "warming up",
    ]
