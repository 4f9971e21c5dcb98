"""Answers for the tests of what frames them: deltas are given, nothing runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.completion import Delta
from app.errors import ModelFailure
from app.sequence import SamplingParams, Sequence

PROMPT_IDS = [1, 2, 3]
TIMINGS = {
    "queue_seconds": 0.25,
    "prefill_seconds": 1.0,
    "decode_seconds": 2.0,
    "tokens_per_second": 2.0,
}


def timed_sequence(num_logprobs: int | None = None) -> Sequence:
    return Sequence(
        request_id="request-1",
        prompt_ids=PROMPT_IDS,
        params=SamplingParams(max_tokens=9, num_logprobs=num_logprobs),
        arrived_at=100.0,
        admitted_at=100.25,
        first_token_at=101.25,
        last_token_at=103.25,
    )


@dataclass
class StubCompletion:
    sequence: Sequence = field(default_factory=timed_sequence)
    num_tokens: int = 5


class StubAnswer:
    """Stands in for an `Answer` whose deltas are known."""

    def __init__(self, num_choices: int = 1, num_logprobs: int | None = None) -> None:
        self.request_id = "request-1"
        self.has_logprobs = num_logprobs is not None
        self.completions = [
            StubCompletion(timed_sequence(num_logprobs)) for _ in range(num_choices)
        ]
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


@dataclass
class FailingDeltas:
    """Yields `deltas`, then fails as an answer does."""

    deltas: Iterable[tuple[int, Delta]]
    error: Exception = field(default_factory=lambda: ModelFailure("the model run failed: OOM"))

    def __iter__(self) -> Iterator[tuple[int, Delta]]:
        yield from self.deltas
        raise self.error


def of_one(deltas: list[Delta]) -> list[tuple[int, Delta]]:
    return [(0, delta) for delta in deltas]


def as_sent(fields: dict[str, Any]) -> dict[str, Any]:
    """Finish reasons become plain text there."""
    sent: dict[str, Any] = orjson.loads(orjson.dumps(fields))
    return sent


def messages(frames: Iterable[bytes]) -> list[Any]:
    """What a client reads of server-sent events: each ends with an empty line."""
    parts = b"".join(frames).split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    texts = [part.removeprefix(b"data: ") for part in parts]
    return [text if text == b"[DONE]" else orjson.loads(text) for text in texts]
