"""Deadlines (FR57), on a clock that the stub model moves: 50 ms for each of its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gevent
import numpy as np
import pytest
from numpy.typing import NDArray

from app.api import create_app
from app.off_hub import Kind
from app.sequence import FinishReason, StepPlan

from .engines import stub_answer
from .services import (
    CODEC,
    CONTEXT,
    SETTINGS,
    StubService,
    events,
    hold_until,
    read_slowly,
    running,
    still_clock,
    until,
)

STEP_SECONDS = 0.05
PROMPT = CODEC.encode("a")
# Between the third and the fourth step.
ASKS: dict[str, tuple[dict[str, Any], dict[str, str], int]] = {
    "field": ({"timeout_ms": 175}, {}, 0),
    "header": ({}, {"X-Request-Timeout": "0.175"}, 0),
    "server": ({}, {}, 175),
    "smaller field": ({"timeout_ms": 175}, {"X-Request-Timeout": "0.9"}, 1000),
    "smaller header": ({"timeout_ms": 900}, {"X-Request-Timeout": "0.175"}, 1000),
}

Made = Callable[..., StubService]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return still_clock(monkeypatch)


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """Until it is set, no step begins that the deadline should prevent."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def make(clock: SimpleNamespace, go_on: threading.Event) -> Iterator[Made]:
    """A service whose step number `num_steps` (of all) is the last before `go_on`. The step behind
    it begins, and takes its time, once the hub has all that came before."""
    with ExitStack() as stack:

        def made(num_steps: int, max_timeout_ms: int = 0, **shape: Any) -> StubService:
            settings = replace(SETTINGS, max_timeout_ms=max_timeout_ms)
            service = stack.enter_context(running(StubService(settings, **shape)))
            service.stub.plans.clear()  # of the self-test

            def change(plan: StepPlan, logits: object) -> None:
                is_behind = len(service.stub.plans) > num_steps
                if is_behind:
                    hold_until(lambda: not service.bridge._outbox)
                clock.now += STEP_SECONDS
                if is_behind:
                    go_on.wait(60)

            service.stub.change = change
            return service

        yield made
        go_on.set()


def text_of(num_tokens: int) -> str:
    return CODEC.detokenizer().feed(stub_answer(PROMPT, num_tokens), is_last=True)


@pytest.mark.parametrize("ask", ASKS)
def test_answer_ends_at_its_deadline_with_the_text_until_then(make: Made, ask: str) -> None:
    fields, headers, maximum = ASKS[ask]
    client = create_app(make(3, maximum)).test_client()
    answer = client.post("/generate", json={"prompt": "a"} | fields, headers=headers).get_json()
    assert (answer["text"], answer["finish_reason"]) == (text_of(3), "timeout")
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_stream_ends_at_its_deadline_with_the_reason(
    make: Made, go_on: threading.Event, path: str
) -> None:
    service = make(3)
    body = {"prompt": "a", "timeout_ms": 175, "temperature": 0, "stream": True}
    response = create_app(service).test_client().post(path, json=body)
    assert response.status_code == 200
    told = response.data.replace(b"data: [DONE]\n\n", b"")
    assert (b"[DONE]" in response.data) == (path != "/generate")
    choices = [event["choices"][0] if "choices" in event else event for event in events(told)]
    assert "".join(choice["text"] for choice in choices) == text_of(3)
    assert choices[-1]["finish_reason"] == "timeout"


def test_row_is_free_in_the_step_after_the_deadline(make: Made, go_on: threading.Event) -> None:
    """The step that runs when the time is over is the last one of the sequence."""
    service = make(3)
    create_app(service).test_client().post("/generate", json={"prompt": "a", "timeout_ms": 175})
    go_on.set()
    until(service.is_idle)
    assert len(service.stub.plans) == 4
    ended = service.registry.get_sample_value(
        "phi_serve_request_success_total", {"finish_reason": "timeout"}
    )
    assert ended == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_deadline_before_the_first_token_is_a_504(make: Made, stream: bool, path: str) -> None:
    body = {"prompt": "a", "timeout_ms": 25, "stream": stream}
    response = create_app(make(0)).test_client().post(path, json=body)
    error = response.get_json()["error"]
    assert (response.status_code, error["code"]) == (504, "deadline_exceeded")
    assert error["type"] == "timeout_error"


def test_deadline_between_the_chunks_of_a_prompt_ends_its_reading(
    make: Made, go_on: threading.Event
) -> None:
    service = make(1)
    body = {"prompt": "abcdefgh" * 4, "timeout_ms": 75}  # four chunks
    response = create_app(service).test_client().post("/generate", json=body)
    assert response.status_code == 504
    go_on.set()
    until(service.is_idle)
    assert len(service.stub.plans) == 2


def test_deadline_in_the_queue_is_a_504_and_no_prompt_is_read(
    make: Made, go_on: threading.Event, clock: SimpleNamespace
) -> None:
    service = make(2, max_batch_size=1)
    app = create_app(service)
    body = {"prompt": "a", "max_tokens": 5}
    first = gevent.spawn(app.test_client().post, "/generate", json=body)
    until(lambda: len(service.stub.plans) == 3)
    late = gevent.spawn(app.test_client().post, "/generate", json={"prompt": "b", "timeout_ms": 20})
    gevent.sleep(0)  # it is in the queue now
    clock.now += 0.02
    assert late.get().status_code == 504
    go_on.set()
    assert first.get().get_json()["usage"]["completion_tokens"] == 5
    until(service.is_idle)
    read = {tuple(plan.prefill.token_ids) for plan in service.stub.plans if plan.prefill}
    assert read == {tuple(PROMPT)}


def test_deadline_ends_every_choice_with_what_it_has(make: Made, go_on: threading.Event) -> None:
    """The second choice's prompt is read in the second step, the third's never."""
    service = make(2)
    body = {"prompt": "a", "n": 3, "temperature": 0, "timeout_ms": 125}
    answer = create_app(service).test_client().post("/generate", json=body).get_json()
    choices = answer["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["timeout"] * 3
    assert [choice["text"] for choice in choices] == [text_of(2), text_of(1), ""]
    assert answer["usage"]["completion_tokens"] == 3
    go_on.set()
    until(service.is_idle)
    assert len(service.stub.plans) == 3


def test_time_does_not_end_what_is_complete_in_time(make: Made) -> None:
    service = make(99)
    body = {"prompt": "a", "max_tokens": 3, "timeout_ms": 10_000}
    answer = create_app(service).test_client().post("/generate", json=body).get_json()
    assert (answer["text"], answer["finish_reason"]) == (text_of(3), "length")


@pytest.mark.parametrize("timeout_ms", [10**12, 2**63 - 1])
def test_longest_timeouts_are_waited_for(make: Made, timeout_ms: int) -> None:
    body = {"prompt": "a", "max_tokens": 3, "timeout_ms": timeout_ms}
    response = create_app(make(99)).test_client().post("/generate", json=body)
    assert response.get_json()["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "headers", "told"),
    [
        (
            {"timeout_ms": 1501},
            {},
            "timeout_ms: 1501 ms is more than this server's maximum of 1500",
        ),
        (
            {"timeout_ms": 99999999999},
            *({}, "timeout_ms: 99999999999 ms is more than this server's maximum of 1500 ms"),
        ),
        (
            *({}, {"X-Request-Timeout": "99999999"}),
            "X-Request-Timeout: 99999999 s is more than this server's maximum of 1.5 s",
        ),
        ({}, {"X-Request-Timeout": "soon"}, "X-Request-Timeout: 'soon' is not a number of seconds"),
    ],
)
def test_timeout_that_cannot_be_had_is_a_400(
    make: Made, path: str, fields: dict[str, Any], headers: dict[str, str], told: str
) -> None:
    service = make(99, max_timeout_ms=1500)
    client = create_app(service).test_client()
    response = client.post(path, json={"prompt": "a"} | fields, headers=headers)
    error = response.get_json()["error"]
    assert (response.status_code, error["param"]) == (400, told.partition(":")[0])
    assert error["message"].startswith(told)
    assert "(MAX_TIMEOUT_MS)" in error["message"] or "soon" in told
    assert service.stub.plans == []


def test_client_reads_what_came_before_the_deadline_of_a_slow_stream(make: Made) -> None:
    """The first event is read before any step but the first: it is not held for the deadline."""
    service = make(1)
    first_is_read = threading.Event()
    take_time = service.stub.change

    def change(plan: StepPlan, logits: NDArray[np.float32]) -> None:
        if len(service.stub.plans) > 1:
            hold_until(first_is_read.is_set)
        take_time(plan, logits)

    service.stub.change = change
    client = create_app(service).test_client()
    told = events(read_slowly(client, first_is_read, prompt="a", timeout_ms=75))
    assert [event.get("finish_reason") for event in told] == [None, FinishReason.TIMEOUT]


# --- before the engine has the request, on the real clock ---------------------------------------

CHAT = {"messages": [{"role": "user", "content": "a"}]}
SOON = {"X-Request-Timeout": "0.02"}


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/chat/completions", "template", CHAT),
        ("/v1/chat/render", "template", CHAT),
        ("/generate", "text", {"prompt": "a" * 9000}),
        ("/v1/completions", "text", {"prompt": ["a" * 5000] * 2}),
        ("/tokenize", "text", {"prompt": "a" * 9000}),
        ("/detokenize", "text", {"tokens": [1] * 9000}),
        ("/generate", "grammar", {"prompt": "a", "regex": "a+"}),
    ],
)
def test_deadline_counts_where_the_request_waits_for_a_thread(
    path: str, kind: Kind, body: dict[str, Any]
) -> None:
    go_on = threading.Event()
    with running(StubService()) as service:
        service.stub.plans.clear()
        off_hub = service.bridge.off_hub
        busy = [gevent.spawn(off_hub, lambda: go_on.wait(60), kind) for _ in range(4)]
        gevent.sleep(0)
        response = create_app(service).test_client().post(path, json=body, headers=SOON)
        go_on.set()
        gevent.joinall(busy, raise_error=True)
        error = response.get_json()["error"]
        assert (response.status_code, error["code"]) == (504, "deadline_exceeded")
        assert service.stub.plans == []


def test_more_messages_than_the_context_has_tokens_are_refused_before_any_template_runs() -> None:
    with running(StubService()) as service:
        client = create_app(service).test_client()
        rendered: list[Any] = []
        object.__setattr__(service.current.model, "chat", SimpleNamespace(render=rendered.append))
        for path in ("/v1/chat/completions", "/v1/chat/render"):
            response = client.post(path, json={"messages": CHAT["messages"] * CONTEXT})
            error = response.get_json()["error"]
            assert (response.status_code, error["param"]) == (400, "messages")
            assert error["code"] == "context_length_exceeded"
            assert f"{CONTEXT} messages" in error["message"]
            assert f"at most {CONTEXT - 1} fit" in error["message"]
        assert rendered == []
