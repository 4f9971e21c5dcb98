"""Who runs in the next step. Pure: no I/O, clock, thread or array.

The policy, whole: every running sequence decodes in every step, for an open stream must not wait;
beside them at most one prompt is read, a chunk per step, as large as `prefill_budget` says. The
next one of the queue is taken up when a row of the cache is free. Rows are contiguous from 0,
decoding sequences first and the one that is reading its prompt behind them: when a row leaves, the
last decoding row takes its place and the prefill closes up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from operator import attrgetter

from .batch_limit import BatchLimit
from .prefill_budget import PrefillBudget
from .repetition import extend_runs, num_repeats
from .sampler import Sampled
from .sequence import (
    Advance,
    Constraint,
    FinishReason,
    Move,
    PrefillChunk,
    Sequence,
    Status,
    StepPlan,
    TokenLogprobs,
)
from .waiting import WaitingQueue

_NOT_FINITE = (
    "the model's logits are not finite for this request (an overflow in fp16, or broken weights)"
)
_owner = attrgetter("owner")
_NO_CHOICE = "no token is left that this request's grammar or its allowed tokens permit"


class Scheduler:
    """Invariant: a sequence is in exactly one of `_waiting`, `_prefilling` and `_decoding`."""

    def __init__(
        self,
        max_batch_size: int,
        max_model_len: int,
        prefill_chunk: int,
        eos_ids: frozenset[int],
        prefill_stall: float = 0.0,
    ) -> None:
        self._limit = BatchLimit(max_batch_size)
        self._max_model_len = max_model_len
        self.prefill_budget = PrefillBudget(prefill_chunk, prefill_stall)
        self._eos_ids = eos_ids
        self._waiting = WaitingQueue()
        self._decoding: list[Sequence] = []  # index = row
        self._prefilling: Sequence | None = None
        self._prefill_row = 0
        self._ended: list[Advance] = []
        self._dequeued: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._decoding) + (self._prefilling is not None)

    @property
    def batch_limit(self) -> int:
        """Most rows that run together: fewer than at first once memory has run out."""
        return self._limit.value

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self.num_running or self._ended)

    def add(self, sequence: Sequence) -> None:
        params = sequence.params
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        # One set for all where it is the same: each step looks into it for each row.
        sequence.end_ids = params.stop_token_ids | eos_ids if params.stop_token_ids else eos_ids
        room = self._max_model_len - len(sequence.prompt_ids)
        sequence.max_output = min(params.max_tokens, room)
        self._waiting.add(sequence)

    def end(self, sequence: Sequence) -> None:
        """The hub has set its `ended_by`: if it waits, it waits no more."""
        if self._waiting.remove(sequence):
            self._end(sequence)

    def plan(self) -> StepPlan:
        """Drops what has ended, admits what fits, and says who runs."""
        moves = self._remove_ended()
        if self._prefilling is None and self._waiting and self._has_free_row():
            self._admit()
        dequeued, self._dequeued = self._dequeued, []
        return StepPlan(moves, self._next_chunk(), list(self._decoding), self.batch_limit, dequeued)

    def shrink(self, plan: StepPlan) -> StepPlan:
        """Memory ran out in `plan`: halves the batch limit; the same step, in runs of so many rows.
        Its moves are made already."""
        self._limit.halve(min(plan.rows_per_run, plan.num_rows))
        return replace(plan, moves=[], rows_per_run=self.batch_limit)

    def commit(self, plan: StepPlan, sampled: Sampled) -> list[Advance]:
        """Records what the step brought; the advances of all sequences that it changed."""
        if plan.prefill is not None:
            plan.prefill.sequence.num_cached += len(plan.prefill.token_ids)
            if plan.prefill.is_last:
                self._decoding.append(plan.prefill.sequence)
                self._prefilling = None
        for sequence in plan.decode:
            sequence.num_cached += 1
        if not plan.is_empty:
            self._limit.recover()
        advances: list[Advance] = []
        # As lists: an array's elements one by one take longer than all that is done with them.
        is_finite, has_choice = sampled.is_finite.tolist(), sampled.has_choice.tolist()
        token_ids, logprobs = sampled.token_ids.tolist(), sampled.logprobs
        sequences = plan.sampled
        for row, sequence in enumerate(sequences):
            if not is_finite[row]:
                advances.append(_failed(sequence, _NOT_FINITE))
            elif not has_choice[row]:
                advances.append(_failed(sequence, _why_no_choice(sequence), FinishReason.DEAD_END))
            else:
                advances.append(self._append(sequence, token_ids[row], logprobs.get(row)))
        for owner, number in Counter(map(_owner, sequences)).items():
            self._waiting.charge(owner, number)
        return self._take_ended() + advances  # not before: `fail` tells them if this has failed

    def fail(self, plan: StepPlan, error: str) -> list[Advance]:
        """Ends every sequence of a step that raised; their rows are free in the next plan."""
        sequences = [*plan.decode, *([plan.prefill.sequence] if plan.prefill else [])]
        return self._take_ended() + [_failed(sequence, error) for sequence in sequences]

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> Advance:
        output_ids = sequence.output_ids
        output_ids.append(token_id)
        params = sequence.params
        is_looping = params.repetition_guard and _repeats(sequence)  # each token has to be counted
        constraint = sequence.constraint
        is_complete = constraint is not None and _completes(constraint, token_id)
        reason = None
        if is_complete or token_id in sequence.end_ids:
            reason = FinishReason.STOP
        elif is_looping and len(output_ids) >= params.min_tokens:
            reason = FinishReason.REPETITION
        elif len(output_ids) >= sequence.max_output:
            reason = FinishReason.LENGTH
        if reason is not None:
            sequence.finish(reason)
        return Advance(sequence, token_id, reason, None, logprobs)

    def _has_free_row(self) -> bool:
        return self.num_running < self.batch_limit

    def _next_chunk(self) -> PrefillChunk | None:
        sequence = self._prefilling
        if sequence is None:
            return None
        start = sequence.num_cached
        num_left = len(sequence.prompt_ids) - start
        size = self.prefill_budget.take(start, num_left, self._decoding, self.num_waiting)
        if size == 0:
            return None
        token_ids = sequence.prompt_ids[start : start + size]
        return PrefillChunk(sequence, self._prefill_row, start, token_ids)

    def _admit(self) -> None:
        """Takes up the next sequence, if there is one that is still wanted."""
        while self._waiting:
            sequence = self._waiting.take()
            if sequence.ended_by is not None:  # `end` was not told yet
                self._end(sequence)
                continue
            self._waiting.charge(sequence.owner, len(sequence.prompt_ids))
            self._dequeued.append(sequence)
            self._prefilling = sequence
            self._prefill_row = len(self._decoding)
            sequence.status = Status.RUNNING
            return

    def _remove_ended(self) -> list[Move]:
        """One look at each row, for in most steps none has ended."""
        rows, prefilling = self._decoding, self._prefilling
        sequences = rows if prefilling is None else [*rows, prefilling]
        if not [s for s in sequences if s.ended_by is not None or s.status is Status.FINISHED]:
            return self._close_up([])
        self._end_marked()
        return self._close_gaps()

    def _end_marked(self) -> None:
        """Ends the running sequences that the hub wants no more of."""
        for sequence in [*self._decoding, *([self._prefilling] if self._prefilling else [])]:
            if sequence.ended_by is not None and not sequence.is_finished:
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """One that the hub has marked."""
        assert sequence.ended_by is not None
        if sequence.status is Status.WAITING:
            self._dequeued.append(sequence)
        sequence.finish(sequence.ended_by)
        self._ended.append(Advance(sequence, None, sequence.ended_by))

    def _take_ended(self) -> list[Advance]:
        ended, self._ended = self._ended, []
        return ended

    def _close_gaps(self) -> list[Move]:
        """Removes finished rows; the moves that keep the rows contiguous, in order."""
        moves: list[Move] = []
        rows = self._decoding
        row = 0
        while row < len(rows):
            if not rows[row].is_finished:
                row += 1
                continue
            last = rows.pop()
            if row < len(rows):  # else the last row itself has ended
                rows[row] = last
                if not last.is_finished:
                    moves.append(Move(len(rows), row, last.num_cached))
        if self._prefilling is not None and self._prefilling.is_finished:
            self._prefilling = None
        return self._close_up(moves)

    def _close_up(self, moves: list[Move]) -> list[Move]:
        """The prefill right behind the decoding rows."""
        num_rows = len(self._decoding)
        if self._prefilling is not None and self._prefill_row != num_rows:
            moves.append(Move(self._prefill_row, num_rows, self._prefilling.num_cached))
            self._prefill_row = num_rows
        return moves


def _completes(constraint: Constraint, token_id: int) -> bool:
    constraint.accept(token_id)
    return constraint.is_complete


def _why_no_choice(sequence: Sequence) -> str:
    error = sequence.constraint.error if sequence.constraint is not None else None
    return _NO_CHOICE if error is None else f"this request's grammar cannot be followed: {error}"


def _repeats(sequence: Sequence) -> bool:
    sequence.runs = extend_runs(sequence.runs, sequence.output_ids)
    return num_repeats(sequence.runs) >= sequence.params.repetition_guard


def _failed(sequence: Sequence, error: str, reason: FinishReason = FinishReason.ERROR) -> Advance:
    sequence.finish(reason, error)
    return Advance(sequence, None, reason, error)
