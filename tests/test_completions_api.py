"""`/generate` and `/v1/completions` on a stub model, in process: choices, seeds, stops, limits."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient

from app.api import create_app
from app.sequence import FinishReason, StepPlan
from app.text import TextCodec

from .answers import messages
from .engines import STUB_VOCAB, stub_answer
from .services import CODEC, CONTEXT, SETTINGS, StubService, hold_until, running, until

PATHS = ["/generate", "/v1/completions"]
ANSWER = stub_answer(CODEC.encode("a"), 60)


@pytest.fixture
def service() -> Iterator[StubService]:
    with running(StubService()) as service:
        service.stub.plans.clear()  # of the self-test
        yield service


@pytest.fixture
def client(service: StubService) -> FlaskClient:
    return create_app(service).test_client()


def ask(client: FlaskClient, path: str = "/generate", **fields: Any) -> dict[str, Any]:
    response = client.post(path, json={"prompt": "a", "temperature": 0} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.get_json()
    return answer


def streamed(client: FlaskClient, path: str = "/generate", **fields: Any) -> list[Any]:
    body = {"prompt": "a", "temperature": 0, "stream": True} | fields
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return messages([response.data])


def error_of(client: FlaskClient, path: str = "/generate", **fields: Any) -> tuple[int, Any]:
    response = client.post(path, json={"prompt": "a"} | fields)
    return response.status_code, response.get_json()["error"]


def text_of(ids: list[int]) -> str:
    return CODEC.detokenizer().feed(ids, is_last=True)


# --- choices ------------------------------------------------------------------------------------


def test_choices_have_seeds_of_their_own_and_are_the_same_again(client: FlaskClient) -> None:
    fields = {"n": 3, "seed": 7, "temperature": 2, "max_tokens": 20}
    first, second = ask(client, **fields), ask(client, **fields)
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in second["choices"]]
    assert first["text"] == texts[0] == ask(client, **fields | {"n": 1})["text"]
    assert first["usage"]["completion_tokens"] == 60


def test_stream_of_choices_joins_to_each_whole_one(client: FlaskClient) -> None:
    fields = {"n": 6, "seed": 7, "temperature": 2, "max_tokens": 20}  # more than run together
    whole = ask(client, **fields)["choices"]
    told = streamed(client, **fields)
    for index, choice in enumerate(whole):
        own = [event for event in told if event["index"] == index]
        assert "".join(event["text"] for event in own) == choice["text"]
        assert [e["finish_reason"] for e in own if "finish_reason" in e] == ["length"]
    assert ["usage" in event for event in told] == [False] * (len(told) - 1) + [True]


def test_choices_of_several_prompts_stand_side_by_side(client: FlaskClient) -> None:
    prompts = ["a", "b", CODEC.encode("c")]
    texts = [text_of(stub_answer(CODEC.encode(prompt), 5)) for prompt in "abc"]
    listed = ["a", "b", "c"]
    answer = ask(client, "/v1/completions", prompt=listed, n=2, max_tokens=5)
    assert [choice["text"] for choice in answer["choices"]] == [
        text for text in texts for _ in range(2)
    ]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens": 30,
        "total_tokens": 33,
    }
    as_ids = [CODEC.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    assert [
        choice["text"]
        for choice in ask(client, "/v1/completions", prompt=as_ids, max_tokens=5)["choices"]
    ] == texts


@pytest.mark.parametrize(("num_prompts", "n"), [(129, 1), (65, 2), (2, 65)])
def test_more_choices_than_a_request_may_have_are_refused(
    service: StubService, client: FlaskClient, num_prompts: int, n: int
) -> None:
    """And none of the prompts is encoded."""
    encoded: list[str] = []
    codec = SimpleNamespace(encode=lambda text, **_: encoded.append(text) or [1])
    object.__setattr__(service.current.model, "codec", codec)
    status, error = error_of(client, "/v1/completions", prompt=["a"] * num_prompts, n=n)
    assert (status, error["param"]) == (400, "prompt")
    assert "more than 128 choices" in error["message"]
    assert encoded == []


def test_prompts_share_what_the_request_says_and_differ_in_their_seeds(
    service: StubService, client: FlaskClient
) -> None:
    fields: dict[str, Any] = {"banned_token_ids": [1, 2, 3], "logit_bias": {"4": 1}, "n": 2}
    ask(client, "/v1/completions", prompt=["a", "a"], max_tokens=2, **fields)
    asked = {sequence for plan in service.stub.plans for sequence in plan.sampled}
    assert len(asked) == 4
    assert len({id(sequence.params.banned_token_ids) for sequence in asked}) == 1
    assert len({id(sequence.params.logit_bias) for sequence in asked}) == 1
    assert len({sequence.params.seed for sequence in asked}) == 4
    assert {sequence.params.max_tokens for sequence in asked} == {2}


def test_as_many_choices_as_a_request_may_have_are_given(client: FlaskClient) -> None:
    answer = ask(client, "/v1/completions", prompt=["a"] * 64, n=2, max_tokens=1)
    assert len(answer["choices"]) == 128


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_stop_string_ends_the_answer_in_the_engine_too(
    service: StubService, client: FlaskClient, path: str
) -> None:
    """The engine goes on only when it has been told, or after three more tokens."""
    stop = text_of(ANSWER[4:6])
    assert stop not in text_of(ANSWER[:5])

    def change(plan: StepPlan, logits: object) -> None:
        [sequence] = plan.sampled
        if len(sequence.output_ids) == 7:
            hold_until(lambda: sequence.ended_by is not None)

    service.stub.change = change
    answer = ask(client, path, max_tokens=50, stop=["never", stop])
    choice = answer["choices"][0] if "choices" in answer else answer
    assert (choice["text"], choice["finish_reason"]) == (text_of(ANSWER[:4]), "stop")
    assert answer["usage"]["completion_tokens"] == 6
    until(service.is_idle)
    assert len(service.stub.plans) <= 8
    assert service.stub.plans[0].sampled[0].finish_reason is FinishReason.STOP


def test_stop_string_ends_its_own_choice_only(client: FlaskClient) -> None:
    fields = {"n": 2, "seed": 3, "temperature": 2, "max_tokens": 20}
    first, second = (choice["text"] for choice in ask(client, **fields)["choices"])
    stop = next(first[at : at + 2] for at in range(len(first)) if first[at : at + 2] not in second)
    told = ask(client, stop=stop, **fields)["choices"]
    assert (told[0]["text"], told[0]["finish_reason"]) == (first[: first.index(stop)], "stop")
    assert (told[1]["text"], told[1]["finish_reason"]) == (second, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_token_ends_the_answer_and_is_no_text(client: FlaskClient, stream: bool) -> None:
    at = ANSWER.index(ANSWER[5])
    fields = {"stop_token_ids": [ANSWER[5]], "max_tokens": 50, "ignore_eos": True}
    told = streamed(client, **fields) if stream else [ask(client, **fields)]
    assert "".join(event["text"] for event in told) == text_of(ANSWER[:at])
    assert (told[-1]["finish_reason"], told[-1]["usage"]["completion_tokens"]) == ("stop", at + 1)


# --- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("num_prompt", "status"),
    [(CONTEXT - 2, 200), (CONTEXT - 1, 200), (CONTEXT, 400), (CONTEXT + 1, 400), (640, 400)],
)
def test_prompt_at_the_context_gets_an_answer_or_a_400_with_both_numbers(
    client: FlaskClient, path: str, stream: bool, num_prompt: int, status: int
) -> None:
    response = client.post(path, json={"prompt": "!" * num_prompt, "stream": stream})
    assert response.status_code == status
    if status == 400:
        error = response.get_json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert f"{num_prompt} tokens" in error["message"]
        assert f"context of {CONTEXT} tokens" in error["message"]
    assert ask(client, path, max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", PATHS)
def test_one_prompt_of_several_that_does_not_fit_runs_none(
    service: StubService, client: FlaskClient, path: str
) -> None:
    prompts: Any = "!" * CONTEXT if path == "/generate" else ["a", "!" * CONTEXT]
    assert error_of(client, path, prompt=prompts)[0] == 400
    assert service.stub.plans == []


def test_token_ids_of_a_prompt_are_those_of_the_model(client: FlaskClient) -> None:
    assert ask(client, "/v1/completions", prompt=[STUB_VOCAB - 1], max_tokens=1)
    for prompt in ([STUB_VOCAB], [[1], [1, STUB_VOCAB]], [2**31 - 1]):
        status, error = error_of(client, "/v1/completions", prompt=prompt)
        assert (status, error["param"]) == (400, "prompt")
        assert f"ids go from 0 to {STUB_VOCAB - 1}" in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"min_tokens": CONTEXT}, "min_tokens"),
        ({"logit_bias": {str(STUB_VOCAB): 1}}, "logit_bias"),
        ({"allowed_token_ids": [STUB_VOCAB]}, "allowed_token_ids"),
        ({"banned_token_ids": [STUB_VOCAB]}, "banned_token_ids"),
        ({"stop_token_ids": [STUB_VOCAB]}, "stop_token_ids"),
    ],
)
def test_field_that_the_model_cannot_keep_is_refused(
    client: FlaskClient, path: str, fields: dict[str, Any], param: str
) -> None:
    status, error = error_of(client, path, **fields)
    assert (status, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("path", PATHS)
def test_prompt_without_tokens_is_refused(
    client: FlaskClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may drop what it does not know."""
    monkeypatch.setattr(TextCodec, "encode", lambda *_, **__: [])
    status, error = error_of(client, path)
    assert (status, error["param"]) == (400, "prompt")


# --- names --------------------------------------------------------------------------------------


def test_unknown_model_is_a_404_that_names_the_known_ones(client: FlaskClient) -> None:
    for name in ("gpt-4o", "", "x" * 5000):
        status, error = error_of(client, "/v1/completions", model=name)
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "stub" in error["message"]
        assert len(error["message"]) < 400


def test_models_are_listed_and_told_one_by_one(client: FlaskClient) -> None:
    listed = client.get("/v1/models").get_json()
    [model] = listed["data"]
    assert (listed["object"], model["id"], model["object"]) == ("list", "stub", "model")
    assert model["max_model_len"] == CONTEXT
    assert client.get("/v1/models/stub").get_json() == model
    assert client.get("/v1/models/other").get_json()["error"]["code"] == "model_not_found"


def test_served_names_stand_for_the_models_own() -> None:
    settings = replace(SETTINGS, served_model_name=("org/phi", "gpt-4o"))
    with running(StubService(settings)) as service:
        client = create_app(service).test_client()
        assert [model["id"] for model in client.get("/v1/models").get_json()["data"]] == [
            *("org/phi", "gpt-4o"),
        ]
        assert client.get("/v1/models/org/phi").get_json()["id"] == "org/phi"
        assert ask(client, "/v1/completions", model="gpt-4o")["model"] == "gpt-4o"
        assert ask(client, "/v1/completions")["model"] == "org/phi"
        assert ask(client)["model"] == "org/phi"
        assert error_of(client, "/v1/completions", model="stub")[0] == 404


# --- memory of log-probabilities (FR19) ---------------------------------------------------------


def peak_of_many(num_rows: int, **fields: Any) -> int:
    """Bytes, while 50 requests run at once on `num_rows` rows and their answers are dropped."""
    with running(StubService(max_batch_size=num_rows)) as service:
        app = create_app(service)

        def ask_and_drop() -> int:
            # Closed, as every server does: a request is open until its answer is.
            with app.test_client().post("/generate", json={"prompt": "a"} | fields) as response:
                return response.status_code

        # A stub takes no time: as a model's steps do, its leave the hub some to take what came.
        service.stub.change = lambda plan, logits: hold_until(lambda: not service.bridge._outbox)
        ask_and_drop()  # what is built once
        tracemalloc.start()
        try:
            jobs = [gevent.spawn(ask_and_drop) for _ in range(50)]
            gevent.joinall(jobs, raise_error=True)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert {job.value for job in jobs} == {200}
    return peak


def test_log_probabilities_are_kept_of_what_runs_however_many_requests_wait() -> None:
    """At most 200 bytes each, of the rows that run and of as many answers that are framed."""
    num_rows, num_tokens, num_logprobs = 4, 30, 20
    without = peak_of_many(num_rows, max_tokens=num_tokens)
    peak = peak_of_many(num_rows, max_tokens=num_tokens, logprobs=num_logprobs)
    assert peak - without < 2 * num_rows * num_tokens * (num_logprobs + 1) * 200
