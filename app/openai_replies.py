"""Answers as OpenAI's objects: text completions and chat completions, whole or in chunks.

`timings` and `request_id` stand beside OpenAI's own fields.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from .completion import Delta
from .passage import TextEvent
from .replies import event, logprobs, timings, usage
from .sequence import FinishReason

if TYPE_CHECKING:
    from .answer import Answer
    from .call_json import ToolCall
    from .completion import Token
    from .replies import Indexed
    from .text import TextCodec
    from .tool_calls import ToolParser

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
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, deltas: Iterable[Indexed]) -> dict[str, Any]:
        """The whole answer as one object: its chunks, joined."""
        taken = [_Joined() for _ in self.answer.completions]
        for index, delta in deltas:
            chunk = self._chunk(index, delta)
            taken[index].add(chunk, *self._said(chunk))
        choices = [
            {"index": index, "finish_reason": joined.finish_reason} | self._join(joined)
            for index, joined in enumerate(taken)
        ]
        head = self._head | {"object": self.object}
        return head | {"choices": choices, "usage": usage(self.answer)} | self._tail()

    def chunks(self, deltas: Iterable[Indexed], *, includes_usage: bool) -> Iterator[bytes]:
        """The answer as server-sent events, `[DONE]` at the end. With `includes_usage` one more
        chunk, without choices, carries it."""
        frame_running = self.running(includes_usage=includes_usage)
        num_running = len(self.answer.completions)
        for index in range(num_running):
            for choice in self._opening():
                yield self._event(index, choice, includes_usage)
        for index, delta in deltas:
            if delta.finish_reason is None:
                if framed := frame_running(index, delta):
                    yield framed
                continue
            num_running -= 1
            tail = self._tail() if num_running == 0 else {}
            *others, last = self._split(self._chunk(index, delta))
            for choice in others:
                yield self._event(index, choice, includes_usage)
            yield self._event(index, last, includes_usage, tail)
        if includes_usage:
            head = self._head | {"object": self.chunk_object}
            yield event(head | {"choices": [], "usage": usage(self.answer)})
        yield DONE

    def running(self, *, includes_usage: bool) -> Callable[[int, Delta], bytes]:
        """Frames deltas that are not a choice's last: to one event, or to none if there is nothing
        to tell."""

        def frame(index: int, delta: Delta) -> bytes:
            choices = self._split(self._chunk(index, delta))
            return b"".join(self._event(index, choice, includes_usage) for choice in choices)

        if len(self.answer.completions) > 1 or not self._is_text_only:
            return frame
        return TextEvent(lambda text: frame(0, Delta(text)))

    @property
    def _is_text_only(self) -> bool:
        """A chunk is the delta's text, and nothing besides."""
        return not self.answer.has_logprobs

    def _event(
        self,
        index: int,
        choice: dict[str, Any],
        includes_usage: bool,
        tail: dict[str, Any] | None = None,
    ) -> bytes:
        unused = {"usage": None} if includes_usage else {}  # OpenAI's chunks all have the field
        fields = {"object": self.chunk_object, "choices": [{"index": index} | choice]}
        return event(self._head | fields | unused | (tail or {}))

    @abstractmethod
    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """A choice of a chunk."""

    @abstractmethod
    def _said(self, chunk: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        """Its text and its calls."""

    @abstractmethod
    def _join(self, joined: _Joined) -> dict[str, Any]:
        """A choice of the whole answer, from those of its chunks."""

    def _opening(self) -> Iterator[dict[str, Any]]:
        """What a stream sends of each choice before its first delta."""
        yield from ()

    def _split(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream that one becomes; none if it has nothing to tell."""
        return [chunk]

    def _tail(self) -> dict[str, Any]:
        return {"timings": timings(self.answer), "request_id": self.answer.request_id}


class _Joined:
    """A choice of a whole answer, as its chunks come: of each no more than what it says is kept."""

    def __init__(self) -> None:
        self._text = StringIO()
        self.calls: list[dict[str, Any]] = []
        self.logprobs: dict[str, Any] | None = None
        self.finish_reason: str | None = None

    def add(self, chunk: dict[str, Any], text: str, calls: list[dict[str, Any]]) -> None:
        self._text.write(text)
        self.calls += calls
        self.finish_reason = chunk["finish_reason"]
        if self.logprobs is None:
            self.logprobs = chunk["logprobs"]
            return
        for name, values in (chunk["logprobs"] or {}).items():
            if values is not None:
                self.logprobs[name] += values

    @property
    def text(self) -> str:
        return self._text.getvalue()


class _Offsets:
    """Where in the text of all tokens each of them begins, in characters."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def of_next(self, spelled: bytes) -> int:
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(spelled))
        return offset


class CompletionReply(Reply):
    """An answer of `/v1/completions`."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, answer: Answer, codec: TextCodec, model: str) -> None:
        super().__init__(answer, codec, model)
        self._offsets = [_Offsets() for _ in answer.completions]

    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "text": delta.text,
            "logprobs": self._lists(index, delta) if self.answer.has_logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def _lists(self, index: int, delta: Delta) -> dict[str, Any]:
        """The older form of log-probabilities: four lists beside each other."""
        return {
            "tokens": [self._name(token.id) for token in delta.tokens],
            "token_logprobs": [token.logprobs.logprob for token in delta.tokens],
            "top_logprobs": [self._top(token) for token in delta.tokens],
            "text_offset": [
                self._offsets[index].of_next(self._codec.spell(token.id)) for token in delta.tokens
            ],
        }

    def _top(self, token: Token) -> orjson.Fragment:
        """With the chosen token, as OpenAI does: there may be one more than was asked for."""
        pairs = [*token.logprobs.top, (token.id, token.logprobs.logprob)]
        return orjson.Fragment(orjson.dumps({self._name(id_): value for id_, value in pairs}))

    def _name(self, token_id: int) -> str:
        """A token's text; one that is half a character, as OpenAI writes it: `bytes:\\xc3`."""
        spelled = self._codec.spell(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _said(self, chunk: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        return chunk["text"], []

    def _join(self, joined: _Joined) -> dict[str, Any]:
        return {"text": joined.text, "logprobs": joined.logprobs}


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

    @property
    def _is_text_only(self) -> bool:
        return self._parsers is None and super()._is_text_only

    def _opening(self) -> Iterator[dict[str, Any]]:
        opening = {"role": "assistant", "content": "", "refusal": None}
        yield {"delta": opening, "logprobs": None, "finish_reason": None}

    def _split(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """The end comes alone, as OpenAI's does: its client misses calls that come with it.

        While a call is held back there is nothing to tell but log-probabilities.
        """
        if chunk["finish_reason"] is None:
            has_tokens = chunk["logprobs"] is not None and bool(chunk["logprobs"]["content"])
            return [chunk] if chunk["delta"] or has_tokens else []
        if not chunk["delta"]:
            return [chunk]
        return [chunk | {"finish_reason": None}, chunk | {"delta": {}, "logprobs": None}]

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
            "logprobs": self._logprobs(delta),
            "finish_reason": self._reason(index, delta),
        }

    def _said(self, chunk: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        delta = chunk["delta"]
        return delta.get("content", ""), delta.get("tool_calls", [])

    def _join(self, joined: _Joined) -> dict[str, Any]:
        content = joined.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if joined.calls:
            whole = [
                {key: call[key] for key in ("id", "type", "function")} for call in joined.calls
            ]
            message |= {"content": content or None, "tool_calls": whole}
        return {"message": message, "logprobs": joined.logprobs}

    def _parse(self, index: int, delta: Delta) -> tuple[str, list[ToolCall]]:
        """Text to show and calls: whole ones, and where the answer is cut what there is of one."""
        if self._parsers is None:
            return delta.text, []
        parser = self._parsers[index]
        parts = parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts += parser.flush(is_cut=delta.finish_reason is not FinishReason.STOP)
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if not isinstance(part, str)]
        self._num_calls[index] += len(calls)
        return content, calls

    def _reason(self, index: int, last: Delta) -> str | None:
        if last.finish_reason is FinishReason.STOP and self._num_calls[index]:
            return "tool_calls"
        return last.finish_reason

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self.answer.has_logprobs:
            return None
        return {"content": logprobs(delta.tokens, self._codec), "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
