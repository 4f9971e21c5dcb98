"""What the fields of a request come to: parameters of the sampler, and what is on by default."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.fields import SamplingFields
from app.generate_requests import GenerateRequest
from app.openai_requests import ChatRequest, CompletionRequest
from app.protocol import parse
from app.sequence import SamplingParams


def request(**fields: Any) -> GenerateRequest:
    return parse(GenerateRequest, orjson.dumps({"prompt": "hello"} | fields))


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hello"}]
    return parse(ChatRequest, orjson.dumps({"messages": messages} | fields))


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, orjson.dumps({"prompt": "hello"} | fields))


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({}, 0.0),
        ({"max_tokens": 5, "ignore_eos": True, "stream": True}, 0.0),
        ({"top_p": 0.9}, 1.0),
        ({"top_p": 1.0}, 0.0),
        ({"top_p": 1, "top_k": -1, "min_p": 0}, 0.0),
        ({"top_k": 0}, 0.0),
        ({"top_k": 5}, 1.0),
        ({"seed": 7}, 1.0),
        ({"seed": 0}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"temperature": None, "seed": 7}, 1.0),
        ({"temperature": 0, "top_p": 0.9, "top_k": 5, "seed": 7}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "top_k": 5}, 0.7),
    ],
)
def test_temperature_is_0_unless_it_is_given_or_a_field_that_only_sampling_knows_is_on(
    fields: dict[str, Any], temperature: float
) -> None:
    assert request(**fields).params(9, None).temperature == temperature


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_of_0_or_minus_1_is_off(top_k: int) -> None:
    assert request(top_k=top_k).params(9, None).top_k == 0


@pytest.mark.parametrize(
    ("seed", "key"), [(0, 0), (7, 7), (-1, 2**64 - 1), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1)]
)
def test_every_seed_has_a_key_of_its_own(seed: int, key: int) -> None:
    assert request(seed=seed).params(9, None).seed == key


@pytest.mark.parametrize("fields", [{}, {"seed": None}])
def test_seed_is_random_unless_given(fields: dict[str, Any]) -> None:
    made = request(**fields)
    seeds = {made.params(9, None).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("asked", [chat(), completion(), chat(temperature=None)])
def test_openais_routes_sample_by_default(asked: SamplingFields) -> None:
    assert asked.params(9, None).temperature == 1.0


def test_params_carry_what_was_asked_for() -> None:
    asked = request(
        min_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.75,
        logit_bias={"7": -100, "8": 1.5},
        allowed_token_ids=[8, 7, 8],
        banned_token_ids=[3, 2, 3],
        seed=11,
        ignore_eos=True,
        stop_token_ids=[5, 5, 6],
        repetition_guard=4,
    )
    assert asked.params(9, 3) == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.75,
        logit_bias={7: -100.0, 8: 1.5},
        allowed_token_ids=(7, 8),
        banned_token_ids=(2, 3),
        seed=11,
        ignore_eos=True,
        stop_token_ids=frozenset({5, 6}),
        repetition_guard=4,
        num_logprobs=3,
    )


@pytest.mark.parametrize("asked", [request(), chat(temperature=0), completion(temperature=0)])
def test_nothing_is_on_unless_it_is_asked_for(asked: SamplingFields) -> None:
    params = asked.params(9, None)
    assert params == SamplingParams(max_tokens=9, seed=params.seed)


@pytest.mark.parametrize("model", [GenerateRequest, CompletionRequest, ChatRequest])
def test_null_is_as_if_a_field_were_not_there(model: type[SamplingFields]) -> None:
    required = {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}
    body = {name: required.get(name) for name in model.model_fields}
    params = parse(model, orjson.dumps(body)).params(9, None)
    assert params == SamplingParams(
        9, temperature=0.0 if model is GenerateRequest else 1.0, seed=params.seed
    )


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("ab", ("ab",)), ([], ()), (["a", "b"], ("a", "b"))]
)
def test_stop_is_one_string_or_several(stop: Any, strings: tuple[str, ...]) -> None:
    assert request(stop=stop).stop_strings == strings


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0)]
    + [({"logprobs": True, "top_logprobs": n}, n) for n in (0, 20)],
)
def test_chats_two_fields_of_log_probabilities_are_one_number(
    fields: dict[str, Any], num_logprobs: int | None
) -> None:
    assert chat(**fields).num_logprobs == num_logprobs


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompt_of_a_completion_is_one_or_several_texts_or_lists_of_ids(
    prompt: Any, prompts: list[Any]
) -> None:
    assert completion(prompt=prompt).prompts == prompts
