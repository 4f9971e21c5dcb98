"""Answers of `/generate`, whole or as events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .completion import Delta
from .passage import TextEvent
from .replies import event, logprobs, timings, usage

if TYPE_CHECKING:
    from .answer import Answer
    from .replies import Indexed
    from .text import TextCodec


def result(
    answer: Answer, deltas: Iterable[Indexed], codec: TextCodec, model: str
) -> dict[str, Any]:
    """The whole answer. With several choices `choices` has them all, and the top is the first."""
    choices: list[dict[str, Any]] = [{"text": ""} for _ in answer.completions]
    for index, delta in deltas:
        fields = _fields(answer, delta, codec)
        choice = choices[index]
        choice["text"] += fields.pop("text")
        choice.setdefault("logprobs", []).extend(fields.pop("logprobs", []))
        choice.update(fields)
    for choice in choices:
        if not answer.has_logprobs:
            choice.pop("logprobs", None)
    numbered = [{"index": index} | choice for index, choice in enumerate(choices)]
    return choices[0] | ({"choices": numbered} if len(choices) > 1 else {}) | _end(answer, model)


def events(
    answer: Answer, deltas: Iterable[Indexed], codec: TextCodec, model: str
) -> Iterator[bytes]:
    """An event per delta, with its choice's index if there are several; the last has what the
    whole answer has besides."""
    frame_running = running(answer, codec)
    num_running = len(answer.completions)
    for index, delta in deltas:
        if delta.finish_reason is None:
            yield frame_running(index, delta)
            continue
        num_running -= 1
        end = _end(answer, model) if num_running == 0 else {}
        yield event(_numbered(answer, index, delta, codec) | end)


def running(answer: Answer, codec: TextCodec) -> Callable[[int, Delta], bytes]:
    """Frames deltas that are not a choice's last."""
    if len(answer.completions) > 1 or answer.has_logprobs:
        return lambda index, delta: event(_numbered(answer, index, delta, codec))
    return TextEvent(lambda text: event(_fields(answer, Delta(text), codec)))


def _numbered(answer: Answer, index: int, delta: Delta, codec: TextCodec) -> dict[str, Any]:
    number = {"index": index} if len(answer.completions) > 1 else {}
    return number | _fields(answer, delta, codec)


def _fields(answer: Answer, delta: Delta, codec: TextCodec) -> dict[str, Any]:
    fields: dict[str, Any] = {"text": delta.text}
    if answer.has_logprobs:
        fields["logprobs"] = logprobs(delta.tokens, codec)
    if delta.finish_reason is not None:
        fields["finish_reason"] = delta.finish_reason
    return fields


def _end(answer: Answer, model: str) -> dict[str, Any]:
    return {
        "usage": usage(answer),
        "timings": timings(answer),
        "request_id": answer.request_id,
        "model": model,
    }
