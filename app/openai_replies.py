"""Answers as OpenAI's objects: text completions and chat completions, whole or in chunks.

`timings` and `request_id` stand beside OpenAI's own fields.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from .replies import event, logprobs, timings, usage
from .sequence import FinishReason

if TYPE_CHECKING:
    from .completion import Answer, Delta
    from .replies import Indexed
    from .text import TextCodec
    from .tool_calls import ToolCall, ToolParser

DONE = b"data: [DONE]\n\n"


class Reply(ABC):
    """Frames one answer. `whole` or `chunks`, once."""

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, answer: Answer, codec: TextCodec, model: str) -> None:
        self.answer = answer
        self._codec = codec
        self._head = {
            "id": f"{self.id_prefix}-{answer.request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, deltas: Iterable[Indexed]) -> dict[str, Any]:
        """The whole answer as one object."""
        taken: list[list[Delta]] = [[] for _ in self.answer.completions]
        for index, delta in deltas:
            taken[index].append(delta)
        choices = [{"index": index} | self._choice(index, each) for index, each in enumerate(taken)]
        head = self._head | {"object": self.object}
        return head | {"choices": choices, "usage": usage(self.answer)} | self._tail()

    def chunks(self, deltas: Iterable[Indexed], *, includes_usage: bool) -> Iterator[bytes]:
        """The answer as server-sent events, `[DONE]` at the end. With `includes_usage` one more
        chunk, without choices, carries it."""
        head = self._head | {"object": self.chunk_object}
        unused = {"usage": None} if includes_usage else {}  # OpenAI's chunks all have the field
        num_running = len(self.answer.completions)
        for index in range(num_running):
            for choice in self._opening():
                yield event(head | {"choices": [{"index": index} | choice]} | unused)
        for index, delta in deltas:
            num_running -= delta.finish_reason is not None
            tail = self._tail() if num_running == 0 else {}
            choice = {"index": index} | self._chunk(index, delta)
            yield event(head | {"choices": [choice]} | unused | tail)
        if includes_usage:
            yield event(head | {"choices": [], "usage": usage(self.answer)})
        yield DONE

    @abstractmethod
    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        """A choice of the whole answer, from all of its deltas."""

    @abstractmethod
    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """A choice of a chunk."""

    def _opening(self) -> Iterator[dict[str, Any]]:
        """What a stream sends of each choice before its first delta."""
        yield from ()

    def _tail(self) -> dict[str, Any]:
        return {"timings": timings(self.answer), "request_id": self.answer.request_id}

    def _entries(self, deltas: list[Delta]) -> list[dict[str, Any]] | None:
        """The log-probabilities of their tokens, if they were asked for."""
        if not self.answer.has_logprobs:
            return None
        return logprobs((token for delta in deltas for token in delta.tokens), self._codec)


class CompletionReply(Reply):
    """An answer of `/v1/completions`."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, answer: Answer, codec: TextCodec, model: str) -> None:
        super().__init__(answer, codec, model)
        self._offsets = [0] * len(answer.completions)  # characters of the tokens told so far

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        return {
            "text": "".join(delta.text for delta in deltas),
            "logprobs": self._lists(index, self._entries(deltas)),
            "finish_reason": deltas[-1].finish_reason,
        }

    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._choice(index, [delta])

    def _lists(self, index: int, entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        """The older form of log-probabilities: four lists beside each other."""
        if entries is None:
            return None
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(entry["token"])
        tops = [entry["top_logprobs"] for entry in entries]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{each["token"]: each["logprob"] for each in top} for top in tops],
            "text_offset": offsets,
        }


class ChatReply(Reply):
    """An answer of `/v1/chat/completions`. With `parsers`, one for each choice, calls of tools are
    taken out of the text."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, answer: Answer, codec: TextCodec, model: str, parsers: list[ToolParser] | None = None
    ) -> None:
        super().__init__(answer, codec, model)
        self._parsers = parsers
        self._num_calls = [0] * len(answer.completions)

    def _opening(self) -> Iterator[dict[str, Any]]:
        opening = {"role": "assistant", "content": "", "refusal": None}
        yield {"delta": opening, "logprobs": None, "finish_reason": None}

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        parsed = [self._parse(index, delta) for delta in deltas]
        content = "".join(text for text, _ in parsed)
        calls = [_call(call) for _, found in parsed for call in found]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "message": message,
            "logprobs": self._logprobs(deltas),
            "finish_reason": self._reason(index, deltas[-1]),
        }

    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        first = self._num_calls[index]
        content, calls = self._parse(index, delta)
        fields: dict[str, Any] = {"content": content} if content else {}
        if calls:
            fields["tool_calls"] = [
                {"index": at} | _call(call) for at, call in enumerate(calls, first)
            ]
        return {
            "delta": fields,
            "logprobs": self._logprobs([delta]),
            "finish_reason": self._reason(index, delta),
        }

    def _parse(self, index: int, delta: Delta) -> tuple[str, list[ToolCall]]:
        """Text to show and complete calls."""
        if self._parsers is None:
            return delta.text, []
        parser = self._parsers[index]
        parts = parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts += parser.flush()
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if not isinstance(part, str)]
        self._num_calls[index] += len(calls)
        return content, calls

    def _reason(self, index: int, last: Delta) -> str | None:
        if last.finish_reason is FinishReason.STOP and self._num_calls[index]:
            return "tool_calls"
        return last.finish_reason

    def _logprobs(self, deltas: list[Delta]) -> dict[str, Any] | None:
        entries = self._entries(deltas)
        return None if entries is None else {"content": entries, "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
