"""Failures (FR42) at token 0, 1 and n, wherever they come from: the client sees a typed end, and
nothing runs on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from app.api import create_app
from app.detokenizer import Detokenizer
from app.passage import TextEvent
from app.sequence import FinishReason, StepPlan
from app.stops import StopMatcher

from .services import StubService, events, hold_until, read_slowly, running, until

PATHS = ["/generate", "/v1/completions"]
# Where it fails, once for each token.
PLACES = [(Detokenizer, "feed"), (StopMatcher, "feed")]
BODY = {"prompt": "a", "max_tokens": 50, "stop": ["never said"]}


@pytest.fixture
def service() -> Iterator[StubService]:
    with running(StubService()) as service:
        service.stub.plans.clear()  # of the self-test
        yield service


@pytest.fixture(params=[(place, at) for place in [None, *PLACES] for at in (0, 1, 5)], ids=str)
def at(
    request: pytest.FixtureRequest, service: StubService, monkeypatch: pytest.MonkeyPatch
) -> int:
    """The token at which it fails; None of the places is the model."""
    place, at = request.param
    if place is None:
        service.stub.change = failing_model(at)
    else:
        fail_at(place, at, monkeypatch)
        service.stub.change = waiting_model(at)
    return int(at)


def failing_model(at: int) -> Callable[[StepPlan, object], None]:
    def change(plan: StepPlan, logits: object) -> None:
        if len(plan.sampled[0].output_ids) == at:
            raise RuntimeError("secret")

    return change


def waiting_model(at: int) -> Callable[[StepPlan, object], None]:
    """Says one token more than the failing one, and goes on only when that has been told."""

    def change(plan: StepPlan, logits: object) -> None:
        [sequence] = plan.sampled
        if len(sequence.output_ids) == at + 2:
            hold_until(lambda: sequence.ended_by is not None)

    return change


def fail_at(place: tuple[object, str], at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = count(), getattr(*place)

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise KeyError("secret")
        return real(*arguments, **options)

    monkeypatch.setattr(*place, fail)


def assert_nothing_runs_on(service: StubService) -> None:
    until(service.is_idle)
    sequence = service.stub.plans[0].sampled[0]
    assert sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
    assert service.bridge.is_ready


@pytest.mark.parametrize("path", PATHS)
def test_failure_of_a_plain_answer_is_a_real_status(
    service: StubService, at: int, path: str
) -> None:
    response = create_app(service).test_client().post(path, json=BODY)
    error = response.get_json()["error"]
    assert (response.status_code, error["type"]) == (500, "server_error")
    assert "secret" not in response.text
    assert_nothing_runs_on(service)


@pytest.mark.parametrize("path", PATHS)
def test_failure_of_a_stream_is_a_real_status_at_its_first_token_and_an_event_later(
    service: StubService, at: int, path: str
) -> None:
    assert_stream_fails(service, at, path)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("path", PATHS)
def test_failure_of_framing_is_one_of_the_stream(
    service: StubService, at: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at((TextEvent, "frame"), at, monkeypatch)
    service.stub.change = waiting_model(at)
    assert_stream_fails(service, at, path)


def assert_stream_fails(service: StubService, at: int, path: str) -> None:
    """With a real status at its first token, and with an event later."""
    client = create_app(service).test_client()
    if at == 0:
        response = client.post(path, json=BODY | {"stream": True})
        told, status = [response.get_json()], response.status_code
        text = response.text
    else:
        first_is_read, change = threading.Event(), service.stub.change

        def wait_for_the_first(plan: StepPlan, logits: Any) -> None:
            if plan.decode:
                first_is_read.wait(60)
            change(plan, logits)

        service.stub.change = wait_for_the_first
        body = read_slowly(client, first_is_read, path, **BODY)
        told, status, text = events(body), 200, body.decode()
    assert status == (500 if at == 0 else 200)
    *before, last = told
    assert last["error"]["type"] == "server_error"
    assert all("error" not in event for event in before)
    assert not {"secret", "[DONE]"} & set(text.replace(":", " ").split())
    assert_nothing_runs_on(service)


def test_failure_that_nobody_foresaw_is_logged_with_the_requests_id(
    service: StubService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_at((Detokenizer, "feed"), 0, monkeypatch)
    headers = {"X-Request-Id": "mine"}
    create_app(service).test_client().post("/generate", json=BODY, headers=headers)
    [record] = [record for record in caplog.records if record.exc_info]
    assert "mine" in record.getMessage()
