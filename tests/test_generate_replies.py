"""Answers of `/generate`: plain and streamed agree."""

from __future__ import annotations

from typing import Any

import pytest

from app.completion import Delta, Token
from app.errors import ModelFailure
from app.generate_replies import events, result
from app.sequence import FinishReason, TokenLogprobs
from app.text import TextCodec

from .answers import TIMINGS, FailingDeltas, StubAnswer, as_sent, messages, of_one
from .tiny_tokenizers import byte_level_tokenizer

CODEC = TextCodec(byte_level_tokenizer(), frozenset())
DELTAS = of_one(
    [
        Delta("The "),
        Delta('"quoted"\n\ndata: line'),
        Delta(" \U0001f642\u2028"),
        Delta("", FinishReason.LENGTH),
    ]
)
END = {
    "usage": {
        "prompt_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens": 5,
        "total_tokens": 8,
    },
    "timings": TIMINGS,
    "request_id": "request-1",
    "model": "phi",
}
LENGTH = {"finish_reason": "length"}


def plain(deltas: Any, answer: Any = None) -> dict[str, Any]:
    return as_sent(result(answer or StubAnswer(), deltas, CODEC, "phi"))


def streamed(deltas: Any, answer: Any = None) -> list[dict[str, Any]]:
    return messages(events(answer or StubAnswer(), deltas, CODEC, "phi"))


def test_plain_answer_is_the_text_and_how_it_ended() -> None:
    assert plain(DELTAS) == {"text": 'The "quoted"\n\ndata: line \U0001f642\u2028'} | LENGTH | END


@pytest.mark.parametrize("first", range(len(DELTAS)))
def test_joined_stream_is_the_plain_text(first: int) -> None:
    joined = "".join(message["text"] for message in streamed(DELTAS[first:]))
    assert joined == plain(DELTAS[first:])["text"]


def test_event_comes_for_every_delta_and_carries_its_text_only() -> None:
    assert streamed(DELTAS)[:-1] == [{"text": delta.text} for _, delta in DELTAS[:-1]]


def test_last_event_carries_what_the_plain_answer_has_besides() -> None:
    assert streamed(DELTAS)[-1] == {"text": ""} | LENGTH | END


@pytest.mark.parametrize("reason", list(FinishReason))
def test_finish_reason_is_sent_as_its_value(reason: FinishReason) -> None:
    deltas = of_one([Delta("a", reason)])
    sent = plain(deltas)["finish_reason"], streamed(deltas)[-1]["finish_reason"]
    assert sent == (reason.value, reason.value)


def test_failure_of_a_plain_answer_is_raised_for_the_status() -> None:
    with pytest.raises(ModelFailure):
        plain(FailingDeltas(DELTAS[:1]))


TWO = [
    *((1, Delta("b")), (0, Delta("a")), (1, Delta("c", FinishReason.STOP))),
    (0, Delta("d", FinishReason.LENGTH)),
]


def test_several_choices_are_all_told_and_the_first_is_on_top() -> None:
    first = {"text": "ad", "finish_reason": "length"}
    told = plain(TWO, StubAnswer(num_choices=2))
    usage = {
        "prompt_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens": 10,
        "total_tokens": 13,
    }
    assert told["choices"] == [
        {"index": 0} | first,
        {"index": 1, "text": "bc", "finish_reason": "stop"},
    ]
    assert {name: told[name] for name in first} == first
    assert told["usage"] == usage


def test_events_of_several_choices_have_their_index_and_the_last_of_all_the_end() -> None:
    told = streamed(TWO, StubAnswer(num_choices=2))
    assert [(message["index"], message["text"]) for message in told] == [
        *((1, "b"), (0, "a"), (1, "c"), (0, "d")),
    ]
    assert ["usage" in message for message in told] == [False, False, False, True]
    assert [message.get("finish_reason") for message in told] == [None, None, "stop", "length"]


def test_logprobs_stand_beside_the_text_and_join_to_those_of_the_plain_answer() -> None:
    [a], [b] = CODEC.encode("a"), CODEC.encode("b")
    tokens = [Token(id_, TokenLogprobs(-1.0, ())) for id_ in (a, b)]
    deltas = of_one(
        [Delta("", tokens=(tokens[0],)), Delta("ab", FinishReason.LENGTH, (tokens[1],))]
    )
    whole = plain(deltas, StubAnswer(num_logprobs=0))
    parts = streamed(deltas, StubAnswer(num_logprobs=0))
    assert [entry["id"] for entry in whole["logprobs"]] == [a, b]
    assert [entry for part in parts for entry in part["logprobs"]] == whole["logprobs"]
