"""What a request may ask of the model that is loaded, to the number."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest

from app.errors import InvalidRequest, PromptTooLong
from app.generate_requests import DEFAULT_MAX_TOKENS, GenerateRequest
from app.limits import (
    MAX_LOGPROB_ENTRIES,
    check_logprobs,
    check_min_tokens,
    check_structure,
    check_token_ids,
    deadline,
    resolve_max_tokens,
)
from app.protocol import parse

CONTEXT = 4096
VOCAB = 100


def request(**fields: Any) -> GenerateRequest:
    return parse(GenerateRequest, orjson.dumps({"prompt": "hello"} | fields))


@pytest.mark.parametrize(
    ("num_prompt", "granted"),
    [
        (1, DEFAULT_MAX_TOKENS),
        (CONTEXT - DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS),
        (CONTEXT - DEFAULT_MAX_TOKENS + 1, DEFAULT_MAX_TOKENS - 1),
        (CONTEXT - 2, 2),
        (CONTEXT - 1, 1),
    ],
)
def test_default_gives_way_to_the_contexts_end(num_prompt: int, granted: int) -> None:
    assert resolve_max_tokens(None, DEFAULT_MAX_TOKENS, num_prompt, CONTEXT) == granted


def test_without_a_default_an_answer_may_fill_the_context() -> None:
    assert resolve_max_tokens(None, None, 10, CONTEXT) == CONTEXT - 10


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(1, CONTEXT - 1), (CONTEXT - 2, 2), (CONTEXT - 1, 1), (10, 1)]
)
def test_max_tokens_that_fits_is_granted_whole(num_prompt: int, max_tokens: int) -> None:
    assert resolve_max_tokens(max_tokens, 256, num_prompt, CONTEXT) == max_tokens


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"),
    [(1, CONTEXT), (CONTEXT - 2, 3), (CONTEXT - 1, 2), (10, 1_000_000_000), (4000, 256)],
)
def test_max_tokens_beyond_the_context_is_refused_with_the_numbers(
    num_prompt: int, max_tokens: int
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        resolve_max_tokens(max_tokens, 256, num_prompt, CONTEXT)
    assert (raised.value.param, raised.value.code) == ("max_tokens", "context_length_exceeded")
    numbers = {max_tokens, CONTEXT, num_prompt, CONTEXT - num_prompt}
    assert [number for number in numbers if str(number) not in raised.value.message] == []


def test_prompt_without_tokens_is_named_as_the_request_does() -> None:
    with pytest.raises(InvalidRequest) as raised:
        resolve_max_tokens(1, None, 0, CONTEXT, prompt_field="messages")
    assert (raised.value.param, raised.value.message) == ("messages", "messages: it has no tokens")


@pytest.mark.parametrize("max_tokens", [None, 1, 1_000_000_000])
@pytest.mark.parametrize("num_prompt", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_prompt_that_leaves_no_room_is_refused_with_both_numbers(
    num_prompt: int, max_tokens: int | None
) -> None:
    with pytest.raises(PromptTooLong) as raised:
        resolve_max_tokens(max_tokens, 256, num_prompt, CONTEXT)
    assert (raised.value.status, raised.value.param) == (400, "prompt")
    assert f"{num_prompt} tokens" in raised.value.message
    assert f"context of {CONTEXT} tokens" in raised.value.message


def test_min_tokens_may_be_all_of_the_answer_and_no_more() -> None:
    check_min_tokens(5, 5)
    with pytest.raises(InvalidRequest, match="min_tokens: 6 is more than the 5 tokens"):
        check_min_tokens(6, 5)


@pytest.mark.parametrize(
    ("num_choices", "num_logprobs"), [(1, 0), (2, 0), (1, 1), (5, 19), (128, 20)]
)
def test_log_probabilities_of_a_request_are_bounded_altogether(
    num_choices: int, num_logprobs: int
) -> None:
    most = MAX_LOGPROB_ENTRIES // (num_choices * (num_logprobs + 1))
    check_logprobs(num_choices, most, num_logprobs)
    check_logprobs(num_choices, most + 1, None)
    with pytest.raises(InvalidRequest, match=str(MAX_LOGPROB_ENTRIES)) as raised:
        check_logprobs(num_choices, most + 1, num_logprobs)
    assert raised.value.param == "logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {str(VOCAB): 1.0, "1": 1.0}),
        ("allowed_token_ids", [1, VOCAB]),
        ("banned_token_ids", [VOCAB]),
        ("stop_token_ids", [2**31 - 1]),
    ],
)
def test_token_that_the_model_does_not_have_is_refused_in_every_field(
    field: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest, match=f"ids go from 0 to {VOCAB - 1}") as raised:
        check_token_ids(request(**{field: value}), VOCAB)
    assert raised.value.param == field


def test_last_token_of_the_model_is_one() -> None:
    last = VOCAB - 1
    ids = {"allowed_token_ids": [last], "banned_token_ids": [last], "stop_token_ids": [last]}
    check_token_ids(request(logit_bias={str(last): 1}, **ids), VOCAB)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("min_tokens", 1), ("ignore_eos", True), ("allowed_token_ids", [1])),
        *(("banned_token_ids", [1]), ("stop", "a"), ("stop", ["a"]), ("stop_token_ids", [1])),
    ],
)
def test_field_that_a_grammar_cannot_go_with_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}: .* regex") as raised:
        check_structure(request(regex="a", **{field: value}), "regex")
    assert raised.value.param == field


def test_fields_at_their_defaults_go_with_a_grammar() -> None:
    check_structure(request(regex="a", seed=1, temperature=1, stop=[], n=2), "regex")


# --- deadlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout_ms", "header", "maximum", "at"),
    [
        (None, None, 0, None),
        (None, None, 2000, 102.0),
        (500, None, 0, 100.5),
        (500, None, 2000, 100.5),
        (2000, None, 2000, 102.0),
        (None, "0.5", 2000, 100.5),
        (None, "2", 2000, 102.0),
        (None, " 1.50 ", 0, 101.5),
        (500, "1", 2000, 100.5),
        (1000, "0.5", 2000, 100.5),
        (None, "0.001", 0, 100.001),
    ],
)
def test_shorter_of_field_and_header_counts_from_the_arrival(
    timeout_ms: int | None, header: str | None, maximum: int, at: float | None
) -> None:
    """Without either, the server's maximum; 0 is none."""
    assert deadline(timeout_ms, header, maximum, 100.0) == at


@pytest.mark.parametrize(
    ("timeout_ms", "header", "param"),
    [
        (2001, None, "timeout_ms"),
        (None, "2.001", "X-Request-Timeout"),
        (500, "3", "X-Request-Timeout"),
        (3000, "1", "timeout_ms"),
    ],
)
def test_more_than_the_servers_maximum_is_refused_naming_it(
    timeout_ms: int | None, header: str | None, param: str
) -> None:
    most = "2000 ms" if param == "timeout_ms" else "2 s"  # in what the client has said it
    with pytest.raises(InvalidRequest, match=rf"{most} \(MAX_TIMEOUT_MS\)") as raised:
        deadline(timeout_ms, header, 2000, 100.0)
    assert raised.value.param == param


@pytest.mark.parametrize(
    "header",
    ["", " ", "0", "-1", "0.0009", "nan", "inf", "1e400", "1_0", "1s", "1,5", "0x1", "\u0661"]
    + ["9" * 400],
)
def test_header_that_is_no_number_of_seconds_is_refused(header: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        deadline(None, header, 0, 100.0)
    assert raised.value.param == "X-Request-Timeout"
    assert len(raised.value.message) < 150


def test_longest_timeout_that_json_can_say_is_a_finite_time() -> None:
    at = deadline(2**63 - 1, None, 0, 100.0)
    assert at is not None
    assert math.isfinite(at)
