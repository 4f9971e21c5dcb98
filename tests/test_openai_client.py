"""`/v1/completions` and `/v1/models` with OpenAI's own client, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from app.text import TextCodec

from .conftest import TinyModel
from .live import LiveServer
from .tiny import CONTEXT, VOCAB


@pytest.fixture(scope="module")
def server(tiny_llama: TinyModel) -> Iterator[LiveServer]:
    with LiveServer(tiny_llama.folder, "--served-model-name", "tiny,gpt-4o") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def codec(tiny_llama: TinyModel) -> TextCodec:
    return TextCodec.load(tiny_llama.folder)


@pytest.fixture(scope="module")
def expected(tiny_llama: TinyModel, codec: TextCodec) -> str:
    """Torch's greedy answer of 12 tokens to "the cat"."""
    ids = tiny_llama.reference.greedy(codec.encode("the cat"), 12)
    return codec.detokenizer().feed(ids, is_last=True)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """Greedy, 12 tokens to "the cat", unless told otherwise."""
    fields = {"model": "tiny", "prompt": "the cat", "max_tokens": 12, "temperature": 0} | fields
    return client.completions.create(extra_body={"ignore_eos": True}, **fields)


def test_text_of_a_prompt_is_torchs(client: openai.OpenAI, codec: TextCodec, expected: str) -> None:
    answer = ask(client)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "length")
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    num_prompt = len(codec.encode("the cat"))
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.total_tokens == num_prompt + 12


def test_four_kinds_of_prompts_are_one(
    client: openai.OpenAI, codec: TextCodec, expected: str
) -> None:
    ids = codec.encode("the cat")
    for prompt, num in (("the cat", 1), (["the cat"] * 2, 2), (ids, 1), ([ids, ids], 2)):
        choices = ask(client, prompt=prompt).choices
        assert [choice.text for choice in choices] == [expected] * num
        assert [choice.index for choice in choices] == list(range(num))


def test_stream_joins_to_the_answer(client: openai.OpenAI, expected: str) -> None:
    chunks = list(ask(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"


def test_stream_tells_its_usage_in_a_last_chunk(client: openai.OpenAI) -> None:
    *chunks, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 12)


def test_seed_and_n_give_the_same_different_answers_again(client: openai.OpenAI) -> None:
    fields = {"n": 3, "seed": 7, "temperature": 1.0}
    first, second = ([c.text for c in ask(client, **fields).choices] for _ in range(2))
    assert first == second
    assert len(set(first)) == 3
    texts = {0: "", 1: "", 2: ""}
    for chunk in ask(client, stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == first


def test_stop_ends_the_text_in_front_of_it(client: openai.OpenAI, expected: str) -> None:
    stop = expected[3:5]
    [choice] = ask(client, stop=[stop, "never said"]).choices
    assert (choice.text, choice.finish_reason) == (expected[: expected.index(stop)], "stop")


def test_logprobs_are_those_of_the_chosen_tokens(client: openai.OpenAI) -> None:
    logprobs = ask(client, logprobs=3).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.text_offset) == 12
    # Greedy: the chosen token is the likeliest of those beside it.
    likeliest = [max(top.values()) for top in logprobs.top_logprobs]
    assert logprobs.token_logprobs == pytest.approx(likeliest)
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "a"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 129}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": "!" * CONTEXT}, "prompt"),
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"stream": True, "max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_had_is_a_bad_request_that_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **fields)
    assert (raised.value.param, raised.value.type) == (param, "invalid_request_error")
    assert param in raised.value.message


def test_platforms_own_fields_are_without_effect(client: openai.OpenAI, expected: str) -> None:
    assert ask(client, user="me", best_of=1, echo=False).choices[0].text == expected


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "gpt-4o"]
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-5")
    assert raised.value.code == "model_not_found"


def test_model_that_is_not_served_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        ask(client, model="gpt-5")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_header_that_is_no_deadline_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, extra_headers={"X-Request-Timeout": "soon"})
    assert raised.value.param == "X-Request-Timeout"


def test_request_id_of_a_client_comes_back(client: openai.OpenAI) -> None:
    answer = ask(client, extra_headers={"X-Request-Id": "mine"})
    assert answer.request_id == "mine"
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["X-Request-Id"] == "mine"
