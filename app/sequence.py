"""A request's life in the engine, and the plan of one step. State only: nothing here acts.

Token ids and integers; text, JSON and arrays are other modules' business.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Values are valid already: the edge has checked them.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; `seed` alone, with the number of
    the step, determines the random choices. `repetition_guard` is how often in a row the same
    n-gram ends an answer; 0 is off.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    repetition_guard: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """Invariant: `num_cached` tokens of `prompt_ids + output_ids` have their keys in the cache.

    `is_aborted` is the one field that the hub writes; the engine thread reads it between steps.
    Instants are in seconds of the engine's clock, None until they have come.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrived_at: float = 0.0
    output_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    runs: list[int] = field(default_factory=list)  # of `repetition`, if it is guarded
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_aborted: bool = False
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def last_token(self) -> int:
        return self.output_ids[-1]

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.error = error


@dataclass(frozen=True, slots=True)
class Move:
    """Row `source` of the KV cache, as far as it is filled, goes to row `target`."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`token_ids` of a prompt, from position `start` on, for the sequence in row `row`."""

    sequence: Sequence
    row: int
    start: int
    token_ids: list[int]

    @property
    def is_last(self) -> bool:
        return self.start + len(self.token_ids) == len(self.sequence.prompt_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: first `moves`, then at most one prefill run, then one decode run.

    The sequence `decode[r]` lies in row r of the cache; a prefill lies right behind them.
    """

    moves: list[Move]
    prefill: PrefillChunk | None
    decode: list[Sequence]

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the logits' rows."""
        if self.prefill is not None and self.prefill.is_last:
            return [*self.decode, self.prefill.sequence]
        return self.decode

    @property
    def is_empty(self) -> bool:
        return self.prefill is None and not self.decode


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step brought one sequence: a token, its end, or both. `token_id` may be an EOS."""

    sequence: Sequence
    token_id: int | None
    finish_reason: FinishReason | None
    error: str | None = None
