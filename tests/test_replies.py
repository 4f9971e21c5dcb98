"""What all answers have in common: usage, timings, log-probabilities, and how a stream ends."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.completion import Delta, Token
from app.errors import DeadEnd, DeadlineExceeded, ModelFailure, NotReady, ServeError
from app.passage import TextEvent
from app.replies import event, guarded, logprobs, timings, usage
from app.sequence import TokenLogprobs
from app.text import TextCodec

from .answers import TIMINGS, FailingDeltas, StubAnswer, messages, of_one
from .tiny_tokenizers import byte_level_tokenizer

CODEC = TextCodec(byte_level_tokenizer(), frozenset())


def test_event_is_one_line_whatever_the_text() -> None:
    assert event({"text": "a\n\r\n\u2028b"}) == 'data: {"text":"a\\n\\r\\n\u2028b"}\n\n'.encode()


@pytest.mark.parametrize("text", ["a", '"\\"', "\0text\0", "\n\u2028\U0001f642", ""])
def test_event_of_a_text_is_the_one_that_is_framed_whole(text: str) -> None:
    def whole(text: str) -> bytes:
        return event({"model": "\0text\0", "text": text, "usage": None})

    framed = TextEvent(whole)
    assert [framed.frame(text), framed.frame("b")] == [whole(text), whole("b")]


def test_usage_adds_up() -> None:
    answer: Any = StubAnswer()
    assert usage(answer) == {
        "prompt_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens": 5,
        "total_tokens": 8,
    }


def test_usage_counts_a_prompt_once_and_the_tokens_of_all_its_choices() -> None:
    answer: Any = StubAnswer(num_choices=3)
    assert usage(answer) == {
        "prompt_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens": 15,
        "total_tokens": 18,
    }


def test_usage_counts_equal_prompts_of_a_list_each() -> None:
    answer: Any = StubAnswer(num_choices=2)
    answer.completions[1].sequence.prompt_ids = [1, 2, 3]
    assert usage(answer)["prompt_tokens"] == 6


def test_timings_are_of_the_whole_request() -> None:
    answer: Any = StubAnswer()
    assert timings(answer) == TIMINGS


def test_usage_tells_what_the_cache_had_of_each_prompt_not_of_its_further_choices() -> None:
    answer: Any = StubAnswer(num_choices=4)
    for completion, num_reused in zip(answer.completions, (1, 2, 2, 0), strict=True):
        completion.sequence.num_reused = num_reused
    for completion in answer.completions[2:]:
        completion.sequence.prompt_ids = other = answer.completions[2].sequence.prompt_ids[:]
        completion.sequence.prompt_ids = other
    answer.completions[3].sequence.prompt_ids = answer.completions[2].sequence.prompt_ids
    assert usage(answer)["prompt_tokens_details"] == {"cached_tokens": 1 + 0}
    answer.completions[3].sequence.num_reused = 2
    assert usage(answer)["prompt_tokens_details"] == {"cached_tokens": 1 + 2}


def test_timings_of_several_choices_go_from_the_first_to_the_last_token() -> None:
    answer: Any = StubAnswer(num_choices=2)
    late = answer.completions[1].sequence
    late.admitted_at, late.first_token_at, late.last_token_at = 101.0, 102.0, 105.25
    assert timings(answer) == {
        "queue_seconds": 0.25,
        "prefill_seconds": 1.0,
        "decode_seconds": 4.0,
        "tokens_per_second": 2.25,
    }


def test_timings_of_a_single_token_have_no_rate() -> None:
    answer: Any = StubAnswer()
    answer.completions[0].sequence.last_token_at = 101.25
    assert timings(answer) == {**TIMINGS, "decode_seconds": 0.0, "tokens_per_second": None}


@pytest.mark.parametrize("stamp", ["admitted_at", "first_token_at", "last_token_at"])
def test_answer_without_a_token_has_no_timings(stamp: str) -> None:
    answer: Any = StubAnswer()
    setattr(answer.completions[0].sequence, stamp, None)
    assert timings(answer) == {}


def test_logprobs_spell_each_token_and_the_likeliest_beside_it() -> None:
    [a], half = CODEC.encode("a"), CODEC.encode("\u00e9")[0]
    told = logprobs([Token(a, TokenLogprobs(-0.5, ((half, -0.25), (a, -0.5))))], CODEC)
    spelled_a = {"id": a, "token": "a", "logprob": -0.5, "bytes": [97]}
    spelled_half = {"id": half, "token": "\ufffd", "logprob": -0.25, "bytes": [0xC3]}
    assert orjson.loads(orjson.dumps(told)) == [
        spelled_a | {"top_logprobs": [spelled_half, spelled_a]}
    ]


@pytest.mark.parametrize("num_deltas", [0, 1, 3])
@pytest.mark.parametrize(
    ("error", "code"),
    [(ModelFailure("out of memory"), "model_failure"), (KeyError("secret"), "internal_error")],
)
def test_failure_midway_becomes_one_error_event_at_the_end(
    num_deltas: int, error: Exception, code: str
) -> None:
    answer: Any = StubAnswer()
    deltas = FailingDeltas(of_one([Delta("a")] * num_deltas), error)
    counted: list[str] = []
    frames = (event({"text": delta.text}) for _, delta in deltas)
    frames = guarded(answer, frames, counted.append)
    *told, last = messages(frames)
    assert told == [{"text": "a"}] * num_deltas
    assert (last["error"]["code"], last["error"]["type"]) == (code, "server_error")
    assert "secret" not in str(last)
    assert counted == [code]
    assert answer.num_aborts == 1


@pytest.mark.parametrize(
    "error", [ModelFailure("x"), NotReady("x"), DeadEnd("x"), DeadlineExceeded("x")], ids=repr
)
def test_failure_midway_is_logged_with_the_requests_id_and_its_code(
    error: ServeError, caplog: pytest.LogCaptureFixture
) -> None:
    answer: Any = StubAnswer()
    frames = (event({"text": delta.text}) for _, delta in FailingDeltas([], error))
    list(guarded(answer, frames, lambda code: None))
    [record] = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert "request-1" in record.getMessage()
    assert error.code in record.getMessage()


def test_client_that_leaves_early_aborts_the_answer() -> None:
    answer: Any = StubAnswer()
    frames: Any = guarded(answer, iter([b"one", b"two"]), lambda code: None)
    next(frames)
    assert answer.num_aborts == 0
    frames.close()
    assert answer.num_aborts == 1
