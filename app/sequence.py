"""A request's life in the engine, and the plan of one step. State only: nothing here acts.

Token ids and integers; text, JSON and arrays are other modules' business.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    TIMEOUT = "timeout"
    DEAD_END = "dead_end"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Values are valid already: the edge has checked them.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and the penalties 1, 0, 0 are off;
    `seed` alone, with the number of the step, determines the random choices. Until `min_tokens`
    no end token can come. `repetition_guard` is how often in a row the same n-gram ends an answer;
    0 is off. `num_logprobs` asks for the log-probability of each token, and of so many of the
    likeliest beside it.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    repetition_guard: int = 0
    num_logprobs: int | None = None

    @property
    def is_plain(self) -> bool:
        """The likeliest token, and no word about it."""
        return self.temperature == 0 and self.num_logprobs is None


class Constraint(Protocol):
    """A grammar, and how far the answer has come in it. Belongs to the engine thread."""

    def accept(self, token_id: int) -> None:
        """The answer goes on with a token that the grammar allowed."""

    @property
    def is_complete(self) -> bool:
        """The answer is whole, and nothing can follow it."""

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further; None if it can."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities: before temperature, penalties, bias
    and masks."""

    logprob: float  # of the token that was chosen
    top: tuple[tuple[int, float], ...]  # of the likeliest, likeliest first: id and logprob


@dataclass(slots=True, eq=False)
class Sequence:
    """Invariant: `num_cached` tokens of `prompt_ids + output_ids` have their keys in the cache.

    `ended_by` is what the hub writes to end the sequence early: its client has gone, its deadline
    passed, or its text holds a stop string. The engine thread reads it between steps.
    `listed` is the hub's, too: its place in the queue, for `backlog`.
    `end_ids` are the tokens that end the answer and `max_output` its length at most, once it has a
    scheduler.
    Instants are in seconds of the engine's clock, None until they have come.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    constraint: Constraint | None = None
    arrived_at: float = 0.0
    owner: str = ""  # the name of an API key; requests of the same one share their turn
    priority: int = 0  # among the owner's: lower is earlier
    end_ids: frozenset[int] = frozenset()
    max_output: int = 0
    output_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_reused: int = 0  # tokens of the prompt that the cache had, as it was first admitted
    num_reread: int = 0  # tokens of the answer that are read again with the prompt
    num_expected: int = 0  # tokens that it will come to, as its row was taken
    num_preemptions: int = 0
    turn: int = 0  # of its first admission: lower is older
    runs: list[int] = field(default_factory=list)  # of `repetition`, if it is guarded
    sampler_state: object = None  # of `edits`, which keeps it from step to step
    is_greedy: bool = False  # likewise: but for a mask, it takes the largest logit as it is
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    ended_by: FinishReason | None = None
    listed: tuple[int, int, int, int, float] | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_to_read(self) -> int:
        """Tokens to be cached before the next one is sampled, as it was admitted last."""
        return len(self.prompt_ids) + self.num_reread

    @property
    def num_needed(self) -> int:
        """Tokens that its row must have room for; of a prompt, with the first token behind it."""
        return max(self.num_cached, self.num_to_read) + 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Of prompt and answer, by position."""
        num_prompt = len(self.prompt_ids)
        if stop <= num_prompt:
            return self.prompt_ids[start:stop]
        answer = self.output_ids[max(0, start - num_prompt) : stop - num_prompt]
        return self.prompt_ids[start:] + answer

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
    """The first `num_tokens` of slot `source` of the KV cache go to slot `target`; at the same time
    the first `num_back` of `target` to `source`. 0: the source stays as it is."""

    source: int
    target: int
    num_tokens: int
    num_back: int = 0


@dataclass(frozen=True, slots=True)
class Resize:
    """The KV cache gets so many slots, of so many tokens each. Slot i keeps its first `filled[i]`
    tokens, slots behind the list's end none."""

    num_slots: int
    max_len: int
    filled: list[int]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`token_ids` of a prompt, from position `start` on, for the sequence in row `row`. After a
    preemption the answer so far is read behind the prompt."""

    sequence: Sequence
    row: int
    start: int
    token_ids: list[int]

    @property
    def is_last(self) -> bool:
        return self.start + len(self.token_ids) == self.sequence.num_to_read


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: first `moves`, then `resize`, then at most one prefill run, then decode runs of at
    most `rows_per_run` rows: one, unless memory has run out.

    The sequence `decode[r]` lies in row r of the cache; a prefill lies right behind them.
    `dequeued` have left the queue since the plan before: taken up for the first time, or ended
    before that. `preempted` ran, and wait again.
    """

    moves: list[Move]
    prefill: PrefillChunk | None
    decode: list[Sequence]
    rows_per_run: int = 1 << 30
    dequeued: list[Sequence] = field(default_factory=list)
    resize: Resize | None = None
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.decode) + (self.prefill is not None)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the logits' rows."""
        if self.prefill is not None and self.prefill.is_last:
            return [*self.decode, self.prefill.sequence]
        return self.decode

    @property
    def is_empty(self) -> bool:
        return self.prefill is None and not self.decode


class Advance(NamedTuple):  # a fifth of the time that a frozen dataclass takes: one a token
    """What a step brought one sequence: a token, its end, or both. `token_id` may be an EOS."""

    sequence: Sequence
    token_id: int | None
    finish_reason: FinishReason | None
    error: str | None = None
    logprobs: TokenLogprobs | None = None
