"""JSON in: what is refused, and how it is told. JSON and SSE out: plain and streamed agree."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from app.completion import Delta
from app.errors import InvalidRequest, ModelFailure, PromptTooLong
from app.protocol import (
    DEFAULT_MAX_TOKENS,
    GenerateRequest,
    event,
    events,
    parse,
    resolve_max_tokens,
    result,
    timings,
    usage,
)
from app.sequence import FinishReason, SamplingParams, Sequence

CONTEXT = 4096
# field -> JSON values that are wrong for it -> what the message says that it must be
WRONG: dict[str, tuple[list[str], str]] = {
    "prompt": (['""', "null", "7", "1.5", "true", '["a"]', "{}"], "at least one character"),
    "parse_special": (["null", '"true"', "0", "1"], "true or false"),
    "stream": (["null", '"true"', "0", "1", "[]"], "true or false"),
    "max_tokens": (
        ["0", "-1", "1e9", '"7"', "1.5", "1.0", "null", "true", "[]", "99999999999999999999"],
        "an integer from 1 to what the prompt leaves of the model's context",
    ),
    "temperature": (["-0.1", "2.1", "1e308", '"1"', "true", "[]"], "from 0 (greedy) to 2"),
    "top_p": (["0", "-0.1", "1.01", '"1"', "null", "true"], "above 0 and at most 1"),
    "top_k": (["-2", "1.5", "1.0", '"5"', "null", "true"], "0 or -1 is off"),
    "seed": (
        [str(2**63), str(-(2**63) - 1), "1e30", "1.5", '"7"', "true"],
        "an integer of 64 bits",
    ),
    "ignore_eos": (["null", '"false"', "1"], "true or false"),
    "repetition_guard": (
        ["0", "1", "-2", "1001", "2.5", '"3"', "true", "[]"],
        "an integer from 2 to 1000",
    ),
}
WRONG_VALUES = [(field, value) for field, (values, _) in WRONG.items() for value in values]

RIGHT_VALUES = [
    ("prompt", "\x00", "\x00"),
    ("prompt", "\U0001f642", "\U0001f642"),
    ("max_tokens", 1, 1),
    ("max_tokens", 1_000_000_000, 1_000_000_000),
    ("temperature", 0, 0.0),
    ("temperature", 2, 2.0),
    ("temperature", None, None),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("top_k", -1, -1),
    ("top_k", 10**9, 10**9),
    ("seed", None, None),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("seed", -(2**63), -(2**63)),
    ("repetition_guard", None, None),
    ("repetition_guard", 2, 2),
    ("repetition_guard", 1000, 1000),
]


def request(**fields: Any) -> GenerateRequest:
    return parse(GenerateRequest, orjson.dumps({"prompt": "hello"} | fields))


def refused(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        parse(GenerateRequest, body)
    return raised.value


def body_with(field: str, value: str) -> bytes:
    """A body whose `field` is `value`, as JSON text, and that is right otherwise."""
    fields = {"prompt": '"hello"'} | {field: value}
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}").encode()


# --- parse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"hello",
        b"{",
        b"{'prompt': 'a'}",
        b'{"prompt": "a",}',
        b'{"prompt": "a"} {}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_body_that_is_not_json_is_refused(body: bytes) -> None:
    error = refused(body)
    assert error.message.startswith("the body is not valid JSON: ")
    assert error.param is None


@pytest.mark.parametrize("body", [b"[]", b'"prompt"', b"7", b"null", b"true", b'[{"prompt": "a"}]'])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    assert refused(body).message == "the body must be a JSON object"


@pytest.mark.parametrize(("field", "value"), WRONG_VALUES)
def test_wrong_value_is_refused_naming_the_field_and_its_limit(field: str, value: str) -> None:
    error = refused(body_with(field, value))
    assert error.param == field
    assert error.message.startswith(f"{field}: ")
    assert WRONG[field][1] in error.message


def test_wrong_values_are_tried_for_every_field() -> None:
    assert WRONG.keys() == GenerateRequest.model_fields.keys()


@pytest.mark.parametrize(
    "field",
    ["max_new_tokens", "stop", "Prompt", "n", "__class__", "model_config", "sampling_params"],
)
def test_unknown_field_is_refused_naming_it_and_the_known_ones(field: str) -> None:
    error = refused(body_with(field, "1"))
    assert error.param == field
    assert [name for name in GenerateRequest.model_fields if name not in error.message] == []


def test_missing_prompt_is_refused_naming_it() -> None:
    error = refused(b'{"max_tokens": 5}')
    assert (error.param, error.message) == ("prompt", "prompt: is required")


def test_refusal_is_a_400_in_openais_shape() -> None:
    error = refused(b"{}")
    assert error.status == 400
    assert error.body() == {
        "error": {
            "message": "prompt: is required",
            "type": "invalid_request_error",
            "code": "invalid_value",
            "param": "prompt",
        }
    }


def test_prompt_alone_is_enough() -> None:
    assert parse(GenerateRequest, b'{"prompt": "hello"}').prompt == "hello"


@pytest.mark.parametrize(("field", "value", "read"), RIGHT_VALUES)
def test_value_at_a_limit_is_taken_as_it_is(field: str, value: Any, read: Any) -> None:
    assert getattr(request(**{field: value}), field) == read


# --- sampling parameters --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({}, 0.0),
        ({"max_tokens": 5, "ignore_eos": True, "stream": True}, 0.0),
        ({"top_p": 0.9}, 1.0),
        ({"top_p": 1.0}, 1.0),
        ({"top_k": 5}, 1.0),
        ({"seed": 7}, 1.0),
        ({"temperature": None, "seed": 7}, 1.0),
        ({"temperature": 0, "top_p": 0.9, "top_k": 5, "seed": 7}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "top_k": 5}, 0.7),
    ],
)
def test_temperature_is_0_unless_it_or_another_sampling_field_is_given(
    fields: dict[str, Any], temperature: float
) -> None:
    assert request(**fields).sampling_params(9).temperature == temperature


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_of_0_or_minus_1_is_off(top_k: int) -> None:
    assert request(top_k=top_k).sampling_params(9).top_k == 0


@pytest.mark.parametrize(
    ("seed", "key"), [(0, 0), (7, 7), (-1, 2**64 - 1), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1)]
)
def test_every_seed_has_a_key_of_its_own(seed: int, key: int) -> None:
    assert request(seed=seed).sampling_params(9).seed == key


@pytest.mark.parametrize("fields", [{}, {"seed": None}])
def test_seed_is_random_unless_given(fields: dict[str, Any]) -> None:
    made = request(**fields)
    seeds = {made.sampling_params(9).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_params_carry_what_was_asked_for() -> None:
    asked = request(
        temperature=0.5, top_p=0.25, top_k=3, seed=11, ignore_eos=True, repetition_guard=4
    )
    assert asked.sampling_params(9) == SamplingParams(9, 0.5, 3, 0.25, 11, True, 4)


def test_repetition_is_not_guarded_unless_asked_for() -> None:
    assert request().sampling_params(9).repetition_guard == 0


# --- max_tokens -----------------------------------------------------------------------------------


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
    assert resolve_max_tokens(request(), num_prompt, CONTEXT) == granted


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(1, CONTEXT - 1), (CONTEXT - 2, 2), (CONTEXT - 1, 1), (10, 1)]
)
def test_max_tokens_that_fits_is_granted_whole(num_prompt: int, max_tokens: int) -> None:
    assert resolve_max_tokens(request(max_tokens=max_tokens), num_prompt, CONTEXT) == max_tokens


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"),
    [(1, CONTEXT), (CONTEXT - 2, 3), (CONTEXT - 1, 2), (10, 1_000_000_000), (4000, 256)],
)
def test_max_tokens_beyond_the_context_is_refused_with_the_numbers(
    num_prompt: int, max_tokens: int
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        resolve_max_tokens(request(max_tokens=max_tokens), num_prompt, CONTEXT)
    assert raised.value.param == "max_tokens"
    numbers = {max_tokens, CONTEXT, num_prompt, CONTEXT - num_prompt}
    assert [number for number in numbers if str(number) not in raised.value.message] == []


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 1}, {"max_tokens": 1_000_000_000}])
@pytest.mark.parametrize("num_prompt", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_prompt_that_leaves_no_room_is_refused_with_both_numbers(
    num_prompt: int, fields: dict[str, Any]
) -> None:
    with pytest.raises(PromptTooLong) as raised:
        resolve_max_tokens(request(**fields), num_prompt, CONTEXT)
    assert (raised.value.status, raised.value.param) == (400, "prompt")
    assert f"{num_prompt} tokens" in raised.value.message
    assert f"context of {CONTEXT} tokens" in raised.value.message


# --- answers --------------------------------------------------------------------------------------


class StubCompletion:
    def __init__(self) -> None:
        self.num_aborts = 0
        self.sequence = Sequence(
            request_id="gen-1",
            prompt_ids=[1, 2, 3],
            params=SamplingParams(max_tokens=9),
            arrived_at=100.0,
            output_ids=[4, 5, 6, 7, 8],
            admitted_at=100.25,
            first_token_at=101.25,
            last_token_at=103.25,
        )

    def abort(self) -> None:
        self.num_aborts += 1


@dataclass
class FailingPieces:
    """Yields `deltas`, then fails as a completion does."""

    deltas: list[Delta]

    def __iter__(self) -> Iterator[Delta]:
        yield from self.deltas
        raise ModelFailure("the model run failed: out of memory")


PIECES = [
    Delta("The ", None),
    Delta('"quoted"\n\ndata: line', None),
    Delta(" \U0001f642\u2028", None),
    Delta("", FinishReason.LENGTH),
]
END = {
    "finish_reason": "length",
    "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    "timings": {
        "queue_seconds": 0.25,
        "prefill_seconds": 1.0,
        "decode_seconds": 2.0,
        "tokens_per_second": 2.0,
    },
    "request_id": "gen-1",
    "model": "phi",
}


def plain(deltas: Any) -> dict[str, Any]:
    # As sent: the finish reason becomes plain text there.
    sent: dict[str, Any] = orjson.loads(orjson.dumps(result(StubCompletion(), deltas, "phi")))
    return sent


def read(frames: list[bytes]) -> list[dict[str, Any]]:
    """What a client reads: a message ends with an empty line."""
    messages = b"".join(frames).split(b"\n\n")
    assert messages.pop() == b""
    assert all(message.startswith(b"data: ") and b"\n" not in message for message in messages)
    return [orjson.loads(message.removeprefix(b"data: ")) for message in messages]


def streamed(deltas: Any) -> list[dict[str, Any]]:
    return read(list(events(StubCompletion(), deltas, "phi")))


def test_plain_answer_is_the_text_and_how_it_ended() -> None:
    assert plain(PIECES) == {"text": 'The "quoted"\n\ndata: line \U0001f642\u2028'} | END


@pytest.mark.parametrize("first", range(len(PIECES)))
def test_joined_stream_is_the_plain_text(first: int) -> None:
    joined = "".join(message["text"] for message in streamed(PIECES[first:]))
    assert joined == plain(PIECES[first:])["text"]


def test_event_comes_for_every_piece() -> None:
    assert [m["text"] for m in streamed(PIECES)] == [delta.text for delta in PIECES]


def test_last_event_carries_what_the_plain_answer_has_besides() -> None:
    assert streamed(PIECES)[-1] == {"text": ""} | END


def test_events_before_the_last_carry_text_only() -> None:
    assert [set(message) for message in streamed(PIECES)[:-1]] == [{"text"}] * 3


@pytest.mark.parametrize("reason", list(FinishReason))
def test_finish_reason_is_sent_as_its_value(reason: FinishReason) -> None:
    deltas = [Delta("a", reason)]
    sent = plain(deltas)["finish_reason"], streamed(deltas)[-1]["finish_reason"]
    assert sent == (reason.value, reason.value)


@pytest.mark.parametrize("num_pieces", [0, 1, 3])
def test_failure_midway_becomes_one_error_event_at_the_end(num_pieces: int) -> None:
    messages = streamed(FailingPieces(PIECES[:num_pieces]))
    assert [set(message) for message in messages] == [{"text"}] * num_pieces + [{"error"}]
    assert messages[-1]["error"] == {
        "message": "the model run failed: out of memory",
        "type": "server_error",
        "code": "model_failure",
        "param": None,
    }


def test_failure_of_a_plain_answer_is_raised_for_the_status() -> None:
    with pytest.raises(ModelFailure):
        plain(FailingPieces(PIECES[:1]))


def test_client_that_leaves_early_aborts_the_completion() -> None:
    completion: Any = StubCompletion()
    stream: Any = events(completion, PIECES, "phi")
    next(stream)
    assert completion.num_aborts == 0
    stream.close()
    assert completion.num_aborts == 1


def test_failure_aborts_the_completion() -> None:
    completion: Any = StubCompletion()
    list(events(completion, FailingPieces([]), "phi"))
    assert completion.num_aborts == 1


def test_event_is_one_line_whatever_the_text() -> None:
    assert event({"text": "a\n\r\n\u2028b"}) == 'data: {"text":"a\\n\\r\\n\u2028b"}\n\n'.encode()


def test_usage_adds_up() -> None:
    assert usage(StubCompletion().sequence) == END["usage"]


def test_timings_of_a_single_token_have_no_rate() -> None:
    sequence = StubCompletion().sequence
    sequence.output_ids, sequence.last_token_at = [4], sequence.first_token_at
    assert timings(sequence) == {
        "queue_seconds": 0.25,
        "prefill_seconds": 1.0,
        "decode_seconds": 0.0,
        "tokens_per_second": None,
    }


@pytest.mark.parametrize("stamp", ["admitted_at", "first_token_at", "last_token_at"])
def test_answer_without_a_token_has_no_timings(stamp: str) -> None:
    sequence = StubCompletion().sequence
    setattr(sequence, stamp, None)
    assert timings(sequence) == {}
