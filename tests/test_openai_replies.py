"""Text completions as OpenAI's objects, whole and in chunks. (Chat's: `test_openai_chat`.)"""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from app.completion import Delta, Token
from app.openai_replies import ChatReply, CompletionReply, Reply
from app.replies import guarded
from app.sequence import FinishReason, TokenLogprobs
from app.text import TextCodec
from app.tool_calls import ToolParser
from app.tools import HERMES

from .answers import TIMINGS, FailingDeltas, StubAnswer, as_sent, messages, of_one
from .tiny_tokenizers import byte_level_tokenizer

CODEC = TextCodec(byte_level_tokenizer(), frozenset())
DELTAS = of_one([Delta("a"), Delta(" b"), Delta("", FinishReason.STOP)])
TWO = [
    *((1, Delta("b")), (0, Delta("a")), (1, Delta("c", FinishReason.STOP))),
    (0, Delta("d", FinishReason.TIMEOUT)),
]
USAGE = {
    "prompt_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens": 5,
    "total_tokens": 8,
}
TAIL = {"timings": TIMINGS, "request_id": "request-1"}


def whole(deltas: Any, answer: Any = None) -> dict[str, Any]:
    return as_sent(CompletionReply(answer or StubAnswer(), CODEC, "phi").whole(deltas))


def chunks(deltas: Any, answer: Any = None, includes_usage: bool = False) -> list[Any]:
    reply = CompletionReply(answer or StubAnswer(), CODEC, "phi")
    return messages(reply.chunks(deltas, includes_usage=includes_usage))


def test_whole_answer_is_openais_object_with_ours_beside() -> None:
    told = whole(DELTAS)
    assert told.pop("created") > 1_700_000_000
    assert re.fullmatch("cmpl-[0-9a-f]{24}", told.pop("id"))
    choice = {"index": 0, "text": "a b", "logprobs": None, "finish_reason": "stop"}
    assert (
        told
        == {
            "object": "text_completion",
            "model": "phi",
            "choices": [choice],
            "usage": USAGE,
        }
        | TAIL
    )


def test_chunks_join_to_the_whole_and_done_ends_them() -> None:
    *told, done = chunks(DELTAS)
    assert done == b"[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == "a b"
    assert [chunk["choices"][0]["finish_reason"] for chunk in told] == [None, None, "stop"]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in told}) == 1
    assert ["timings" in chunk for chunk in told] == [False, False, True]
    assert all("usage" not in chunk for chunk in told)


def test_usage_comes_in_a_chunk_of_its_own_without_choices() -> None:
    *told, last, done = chunks(DELTAS, includes_usage=True)
    assert (last["choices"], last["usage"], done) == ([], USAGE, b"[DONE]")
    assert all(chunk["usage"] is None for chunk in told)


def test_choices_have_their_index_whatever_order_they_come_in() -> None:
    assert [
        (choice["index"], choice["text"], choice["finish_reason"])
        for choice in whole(TWO, StubAnswer(num_choices=2))["choices"]
    ] == [(0, "ad", "timeout"), (1, "bc", "stop")]
    *told, _ = chunks(TWO, StubAnswer(num_choices=2))
    choices = [chunk["choices"][0] for chunk in told]
    assert [choice["index"] for choice in choices] == [1, 0, 1, 0]
    assert ["timings" in chunk for chunk in told] == [False, False, False, True]


@pytest.mark.parametrize("num_deltas", [0, 1, 2])
@pytest.mark.parametrize("includes_usage", [False, True])
def test_failure_ends_the_chunks_without_done_and_without_usage(
    num_deltas: int, includes_usage: bool
) -> None:
    answer: Any = StubAnswer()
    reply = CompletionReply(answer, CODEC, "phi")
    frames = reply.chunks(FailingDeltas(DELTAS[:num_deltas]), includes_usage=includes_usage)
    *told, last = messages(guarded(answer, frames, lambda code: None))
    assert [chunk["choices"][0]["text"] for chunk in told] == ["a", " b"][:num_deltas]
    assert last.keys() == {"error"}
    assert answer.num_aborts == 1


def with_logprobs() -> list[tuple[int, Delta]]:
    """Of "a", the halves of "é", and "b"; the first half's text is held back."""
    ids = [*CODEC.encode("a"), *CODEC.encode("é"), *CODEC.encode("b")]
    tokens = [Token(id_, TokenLogprobs(-i / 4, ((id_, -i / 4),))) for i, id_ in enumerate(ids)]
    texts = ["a", "", "é", "b"]
    deltas = [Delta(text, tokens=(token,)) for text, token in zip(texts, tokens, strict=True)]
    return of_one([*deltas, Delta("", FinishReason.LENGTH)])


def test_logprobs_are_four_lists_of_one_length() -> None:
    told = whole(with_logprobs(), StubAnswer(num_logprobs=1))["choices"][0]["logprobs"]
    assert told["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert told["token_logprobs"] == [0.0, -0.25, -0.5, -0.75]
    assert told["top_logprobs"] == [
        {token: logprob}
        for token, logprob in zip(told["tokens"], told["token_logprobs"], strict=True)
    ]
    assert told["text_offset"] == [0, 1, 1, 2]


def test_logprobs_of_the_chunks_join_to_those_of_the_whole() -> None:
    told = whole(with_logprobs(), StubAnswer(num_logprobs=1))["choices"][0]["logprobs"]
    *parts, _ = chunks(with_logprobs(), StubAnswer(num_logprobs=1))
    lists = [part["choices"][0]["logprobs"] for part in parts]
    assert {name: sum((each[name] for each in lists), []) for name in told} == told


CUT_CALL = '<tool_call>\n{"name": "weather", "arguments": {"ci'


@pytest.mark.parametrize("reason", ["length", "timeout", "repetition"])
def test_call_that_is_cut_short_is_a_call_with_the_reason_of_the_end(reason: str) -> None:
    deltas = of_one([Delta(CUT_CALL), Delta("", FinishReason(reason))])
    told = as_sent(chat_reply().whole(deltas))["choices"][0]
    [call] = told["message"]["tool_calls"]
    assert (told["finish_reason"], told["message"]["content"]) == (reason, None)
    assert call["function"] == {"name": "weather", "arguments": '{"ci'}


def test_call_that_the_model_itself_breaks_off_is_text() -> None:
    told = chat_reply().whole(of_one([Delta(CUT_CALL), Delta("", FinishReason.STOP)]))
    assert as_sent(told)["choices"][0]["message"]["content"] == CUT_CALL


def chat_reply() -> ChatReply:
    answer: Any = StubAnswer()
    return ChatReply(answer, CODEC, "phi", [ToolParser(HERMES, {"weather"})])


@pytest.mark.parametrize("kind", [CompletionReply, ChatReply])
def test_whole_answer_keeps_nothing_of_a_token_but_its_text(kind: type[Reply]) -> None:
    num_tokens = 20_000

    def deltas() -> Iterator[tuple[int, Delta]]:
        for _ in range(num_tokens):
            yield 0, Delta("word ")
        yield 0, Delta("", FinishReason.LENGTH)

    answer: Any = StubAnswer()
    tracemalloc.start()
    try:
        [choice] = kind(answer, CODEC, "phi").whole(deltas())["choices"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert choice["finish_reason"] == "length"
    assert peak < 80 * num_tokens  # 5 characters of up to 4 bytes, twice, and what grows ahead


@pytest.mark.parametrize("includes_usage", [False, True])
@pytest.mark.parametrize("parsed", [False, True])
def test_running_chat_chunk_is_the_one_of_the_stream(parsed: bool, includes_usage: bool) -> None:
    """What is written past the stream is framed as in it."""
    answer: Any = StubAnswer()

    def reply() -> ChatReply:
        parsers = [ToolParser(HERMES, {"f"}, None, is_forced=False)] if parsed else None
        made = ChatReply(answer, CODEC, "phi", parsers)
        made._head = {"id": "chatcmpl-1", "created": 1, "model": "phi"}
        return made

    deltas = of_one([Delta('a "b"'), Delta("c\n")])
    frames = [*reply().chunks(deltas, includes_usage=includes_usage)]
    running = reply().running(includes_usage=includes_usage)
    assert [running(index, delta) for index, delta in deltas] == frames[1:3]
