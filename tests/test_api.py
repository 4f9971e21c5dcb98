"""Routes on a stub model, in process: what a client sees when the engine fails, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import gevent
import numpy as np
import pytest
from flask.testing import FlaskClient
from numpy.typing import NDArray
from werkzeug.test import TestResponse

from app.api import create_app
from app.detokenizer import Detokenizer
from app.sequence import StepPlan
from app.text import TextCodec

from .engines import stub_answer
from .services import StubService, events, read_slowly, running
from .tiny_tokenizers import byte_level_tokenizer

# The stub's answer to the prompt "a", token by token.
ANSWER = stub_answer(byte_level_tokenizer().encode("a"), 64)


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[StubService]:
    with running(StubService(eos_ids=getattr(request, "param", ()))) as service:
        yield service


@pytest.fixture
def client(service: StubService) -> FlaskClient:
    return create_app(service).test_client()


def failing_at(step: int) -> Callable[[StepPlan, object], None]:
    steps = iter(range(100))

    def fail(plan: StepPlan, logits: object) -> None:
        if next(steps) == step:
            raise RuntimeError("the device is lost")

    return fail


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_is_a_real_500(
    service: StubService, client: FlaskClient, stream: bool
) -> None:
    service.stub.change = failing_at(0)
    response = client.post("/generate", json={"prompt": "a", "stream": stream})
    assert response.status_code == 500
    assert response.get_json()["error"]["code"] == "model_failure"
    assert "device is lost" not in response.text  # the type is told, the server's inside is not


@pytest.mark.parametrize("step", [3, 9])
def test_failure_in_mid_stream_is_one_error_event_at_the_end(
    service: StubService, client: FlaskClient, step: int
) -> None:
    first_is_read, fail = threading.Event(), failing_at(step)

    def change(plan: StepPlan, logits: object) -> None:
        if plan.decode:
            first_is_read.wait(60)
        fail(plan, logits)

    service.stub.change = change
    body = read_slowly(client, first_is_read, prompt="a", max_tokens=20)
    *deltas, last = events(body)
    assert last["error"]["code"] == "model_failure"
    assert all("error" not in delta for delta in deltas)
    assert b"[DONE]" not in body


def test_failure_in_mid_answer_of_a_plain_request_is_a_500(
    service: StubService, client: FlaskClient
) -> None:
    service.stub.change = failing_at(5)
    response = client.post("/generate", json={"prompt": "a", "max_tokens": 20})
    assert response.status_code == 500


@pytest.mark.parametrize("num_failures", [1, 2, 5])
def test_server_serves_on_after_failures(
    service: StubService, client: FlaskClient, num_failures: int
) -> None:
    """Not ready for a probe after two in a row, yet a request that succeeds ends that."""

    def fail(plan: StepPlan, logits: object) -> None:
        raise RuntimeError

    service.stub.change = fail
    for _ in range(num_failures):
        assert client.post("/generate", json={"prompt": "a"}).status_code == 500
    assert client.get("/health/ready").status_code == (200 if num_failures < 2 else 503)
    service.stub.change = lambda plan, logits: None
    response = client.post("/generate", json={"prompt": "a", "max_tokens": 3})
    assert response.get_json()["usage"]["completion_tokens"] == 3
    assert client.get("/health/ready").status_code == 200


@pytest.mark.parametrize("service", [(ANSWER[5],)], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_end_token_ends_the_answer_and_is_no_text(
    service: StubService, client: FlaskClient, stream: bool
) -> None:
    """This one has a text of its own: it would be seen."""
    length = ANSWER.index(ANSWER[5])
    response = client.post("/generate", json={"prompt": "a", "stream": stream})
    answers = events(response.data) if stream else [response.get_json()]
    codec = TextCodec(byte_level_tokenizer(), frozenset())
    assert codec.detokenizer().feed([ANSWER[5]], is_last=True) != ""
    expected = codec.detokenizer().feed(ANSWER[:length], is_last=True)
    assert "".join(answer["text"] for answer in answers) == expected
    assert answers[-1]["finish_reason"] == "stop"
    assert answers[-1]["usage"]["completion_tokens"] == length + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_before", [0, 5])
def test_request_with_non_finite_logits_fails_alone_and_is_counted(
    service: StubService, num_before: int, stream: bool
) -> None:
    """The second of three in a batch, at its first token and later."""
    prompts = ["a", "b", "c"]
    spoiled_ids = byte_level_tokenizer().encode("b")
    all_have_come, second_has_begun = threading.Event(), threading.Event()

    def spoil(plan: StepPlan, logits: NDArray[np.float32]) -> None:
        all_have_come.wait(60)
        for row, sequence in enumerate(plan.sampled):
            if sequence.prompt_ids == spoiled_ids and len(sequence.output_ids) == num_before:
                if stream and num_before:  # the hub could hear of tokens and failure at once
                    second_has_begun.wait(60)
                logits[row, 3] = np.nan

    service.stub.change = spoil
    app = create_app(service)

    def ask(prompt: str) -> TestResponse:
        body = {"prompt": prompt, "max_tokens": 30, "stream": stream}
        return app.test_client().post("/generate", json=body)

    jobs = [gevent.spawn(ask, prompt) for prompt in prompts]
    jobs[1].link(lambda _: second_has_begun.set())
    gevent.spawn(all_have_come.set)
    first, second, third = (job.get() for job in jobs)
    for response in (first, third):
        end = events(response.data)[-1] if stream else response.get_json()
        assert (end["finish_reason"], end["usage"]["completion_tokens"]) == ("length", 30)
    assert second.status_code == (200 if stream and num_before else 500)
    end = events(second.data)[-1] if second.status_code == 200 else second.get_json()
    assert (end["error"]["code"], "not finite" in end["error"]["message"]) == (
        "model_failure",
        True,
    )
    assert any(len(plan.sampled) == 3 for plan in service.stub.plans) or num_before == 0
    assert service.registry.get_sample_value("phi_serve_non_finite_logits_total") == 1
    assert service.bridge.is_ready


def test_fault_in_the_detokenizer_is_one_error_event_and_frees_the_row(
    service: StubService, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds = iter(range(100))
    feed = Detokenizer.feed

    def fail(detokenizer: Detokenizer, ids: list[int], *, is_last: bool = False) -> str:
        if next(feeds) == 1:
            raise KeyError("secret detail")
        return feed(detokenizer, ids, is_last=is_last)

    monkeypatch.setattr(Detokenizer, "feed", fail)
    # The step waits for the first event to be read, so that the fault comes in mid-stream.
    first_is_read = threading.Event()
    service.stub.change = lambda plan, logits: first_is_read.wait(60) if plan.decode else None
    received = read_slowly(client, first_is_read, prompt="a", max_tokens=40)
    assert [list(event) for event in events(received)] == [["text"], ["error"]]
    assert b"secret" not in received
    with gevent.Timeout(60):
        while service.registry.get_sample_value("phi_serve_num_requests_running"):
            gevent.sleep(0.001)


def test_long_prompt_is_tokenized_off_the_hub(
    service: StubService, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def encode(codec: TextCodec, text: str, **_: object) -> list[int]:
        threads.append(threading.get_ident())
        return [1]

    monkeypatch.setattr(TextCodec, "encode", encode)
    for num_characters in (10, 9000):
        client.post("/generate", json={"prompt": "a" * num_characters, "max_tokens": 1})
    assert threads[0] == threading.get_ident() != threads[1]


def test_arrival_is_stamped_before_the_prompt_is_tokenized(
    service: StubService, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def encode(codec: TextCodec, text: str, **_: object) -> list[int]:
        order.append("encode")
        return [1]

    def monotonic() -> float:
        order.append("clock")
        return 1.0

    monkeypatch.setattr(TextCodec, "encode", encode)
    monkeypatch.setattr("app.http.time", SimpleNamespace(monotonic=monotonic))
    client.post("/generate", json={"prompt": "a", "max_tokens": 1})
    assert order == ["clock", "encode"]


def test_every_error_is_counted_by_its_code(service: StubService, client: FlaskClient) -> None:
    client.get("/nope")
    client.get("/generate")
    client.post("/generate", json={})
    counts = {
        code: service.registry.get_sample_value(
            "phi_serve_requests_rejected_total", {"reason": code}
        )
        for code in ("not_found", "method_not_allowed", "invalid_value")
    }
    assert counts == {"not_found": 1, "method_not_allowed": 1, "invalid_value": 1}


def test_a_bug_in_a_route_gets_a_500_without_a_trace(
    service: StubService, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(service.current, "submit", fail)
    response = client.post("/generate", json={"prompt": "a"})
    assert response.status_code == 500
    assert response.get_json()["error"]["type"] == "server_error"
    assert "secret" not in response.text


def test_readiness_ends_with_the_engine(service: StubService, client: FlaskClient) -> None:
    assert client.get("/health/ready").status_code == 200
    service.bridge.request_stop()
    assert client.get("/health/ready").status_code == 503
    assert client.get("/health/live").status_code == 200


def test_a_probe_is_not_counted_as_a_rejected_request(
    service: StubService, client: FlaskClient
) -> None:
    service.bridge.request_stop()
    client.get("/health/ready")
    client.post("/generate", json={"prompt": "a"})
    counts = [
        service.registry.get_sample_value("phi_serve_requests_rejected_total", {"reason": reason})
        for reason in ("not_ready", "draining")
    ]
    assert counts == [0, 1]


# More ways to read what there is with each character, which is always the same: it gives up at
# the 34th.
AMBIGUOUS = {
    "prompt": "a",
    "grammar": 'start: s\ns: s s | s s s | s s s s | "a"',
    "max_tokens": 60,
    "logit_bias": {"64": 100},
}


def test_grammar_that_gives_up_is_its_own_requests_error(client: FlaskClient) -> None:
    jobs = [
        gevent.spawn(client.post, "/generate", json=body)
        for body in (AMBIGUOUS, {"prompt": "a", "max_tokens": 60})
    ]
    gevent.joinall(jobs, timeout=60, raise_error=True)
    hostile, other = (job.value for job in jobs)
    assert hostile.status_code == 400
    assert hostile.get_json()["error"]["code"] == "dead_end"
    assert "grammar cannot be followed" in hostile.get_json()["error"]["message"]
    codec = TextCodec(byte_level_tokenizer(), frozenset())
    expected = codec.detokenizer().feed(ANSWER[:60], is_last=True)
    assert other.get_json()["text"] == expected


def test_grammar_that_gives_up_in_mid_stream_is_one_error_event_at_the_end(
    service: StubService, client: FlaskClient
) -> None:
    first_is_read = threading.Event()

    def change(plan: StepPlan, logits: object) -> None:
        if plan.decode:
            first_is_read.wait(60)

    service.stub.change = change
    *deltas, last = events(read_slowly(client, first_is_read, **AMBIGUOUS))
    assert last["error"]["code"] == "dead_end"
    assert {*"".join(delta["text"] for delta in deltas)} == {"a"}
