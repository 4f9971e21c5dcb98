"""Who runs in the next step. Pure: no I/O, clock, thread or array.

The policy, whole: every running sequence decodes in every step, for an open stream must not wait;
beside them at most one prompt is read, a chunk per step, as large as `prefill_budget` says. The
next one of the queue is taken up when it fits in the budget with all that run (`arena.py`). Where
those outgrow it, the youngest is preempted: it waits again, first of its owner's, and reads prompt
and answer anew later. A single row always may run. Which row is whose: `slots.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from operator import attrgetter

from .advances import append, failed, no_choice, not_finite
from .arena import Arena, KVUsage
from .batch_limit import BatchLimit
from .prefill_budget import PrefillBudget
from .sampler import Sampled
from .sequence import Advance, Move, PrefillChunk, Resize, Sequence, Status, StepPlan
from .slots import Slots
from .waiting import WaitingQueue

_EXPECTED_TOKENS = 256  # of an answer: room for so many is made at once, where there is some
_owner = attrgetter("owner")
_turn = attrgetter("turn")


class Scheduler:
    """Invariant: a sequence is in exactly one of `_waiting` and `_slots`."""

    def __init__(
        self,
        max_batch_size: int,
        max_model_len: int,
        prefill_chunk: int,
        eos_ids: frozenset[int],
        arena: Arena | None = None,
        *,
        is_exact: bool = False,
        min_shared: int | None = None,
        prefill_stall: float = 0.0,
    ) -> None:
        """Without an `arena` all rows fit at their full length. `is_exact`: what is read again is
        read in the runs in which it was first, so that no number changes. `min_shared`: from how
        many tokens on a prompt's beginning is not read again that the cache has; None: never."""
        assert not (is_exact and min_shared), "what another request left was read in other runs"
        self.arena = arena or Arena.fixed(max_batch_size, max_model_len)
        self._limit = BatchLimit(max_batch_size)
        self._max_model_len = max_model_len
        self.prefill_budget = PrefillBudget(prefill_chunk, prefill_stall)
        self._eos_ids = eos_ids
        self._is_exact = is_exact
        self._waiting = WaitingQueue()
        self._slots = Slots(min_shared)
        self._num_admitted = 0
        self._ended: list[Advance] = []
        self._dequeued: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return self._slots.num_running

    @property
    def batch_limit(self) -> int:
        """Most rows that run together, of the length of those that do: fewer than at first where
        memory is short."""
        return min(self._limit.value, self.arena.max_rows(self._slots.longest))

    @property
    def num_written(self) -> int:
        """Tokens that the cache has memory for, where that is taken as they are written."""
        return self._slots.num_written

    @property
    def usage(self) -> KVUsage:
        arena, limit = self.arena, self.batch_limit
        why = "memory" if limit < self._limit.value else self._limit.why
        num_tokens, per_token = self._slots.num_cached, arena.limits.bytes_per_token
        return KVUsage(limit, why, arena.size, num_tokens, arena.budget, per_token)

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
        """Drops what has ended, preempts what fits no more, admits what does, says who runs."""
        slots = self._slots
        self._end_marked()
        moves = slots.close_gaps()
        preempted = self._preempt()
        if preempted:
            moves += slots.close_gaps()
            _forget(preempted)
        if slots.prefilling is None and self._waiting and self._has_free_row():
            moves += self._admit()
        resize = self._resize(moves)
        dequeued, self._dequeued = self._dequeued, []
        limit, chunk = self.batch_limit, self._next_chunk()
        return StepPlan(moves, chunk, list(slots.decoding), limit, dequeued, resize, preempted)

    def shrink(self, plan: StepPlan) -> StepPlan:
        """Memory ran out in `plan`: halves the batch limit; the same step, in runs of so many rows.
        Its moves are made already."""
        self._limit.halve(min(plan.rows_per_run, plan.num_rows))
        return replace(plan, moves=[], resize=None, rows_per_run=self._limit.value)

    def retreat(self, plan: StepPlan) -> StepPlan:
        """Memory ran out as the cache was resized, which has cost its contents: all of `plan` wait
        again, and half as many will run. A plan of nothing."""
        self._limit.halve(plan.num_rows)
        preempted = sorted(self._slots.running, key=_turn, reverse=True)
        for sequence in preempted:
            self._put_back(sequence)
        self._slots.close_gaps()
        self._slots.forget()
        _forget(preempted)
        return StepPlan([], None, [], self.batch_limit, preempted=preempted)

    def rest(self) -> Resize:
        """Nothing runs, nor has for long: the cache as small as it gets."""
        self._slots.forget()
        size = self.arena.rest()
        self._slots.renew(*size)
        return Resize(*size, [])

    def commit(self, plan: StepPlan, sampled: Sampled) -> list[Advance]:
        """Records what the step brought; the advances of all sequences that it changed."""
        if plan.prefill is not None:
            plan.prefill.sequence.num_cached += len(plan.prefill.token_ids)
            if plan.prefill.is_last:
                self._slots.promote()
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
                advances.append(not_finite(sequence))
            elif not has_choice[row]:
                advances.append(no_choice(sequence))
            else:
                advances.append(append(sequence, token_ids[row], logprobs.get(row)))
        for owner, number in Counter(map(_owner, sequences)).items():
            self._waiting.charge(owner, number)
        return self._take_ended() + advances  # not before: `fail` tells them if this has failed

    def fail(self, plan: StepPlan, error: str) -> list[Advance]:
        """Ends every sequence of a step that raised; their rows are free in the next plan. It may
        have raised between the moves, so nothing is known of any row: a prompt that was not read in
        that step is read anew."""
        sequences = [*plan.decode, *([plan.prefill.sequence] if plan.prefill else [])]
        advances = self._take_ended() + [failed(sequence, error) for sequence in sequences]
        paused = self._slots.prefilling
        if paused is not None and paused.status is Status.RUNNING:
            self._put_back(paused)
            self._slots.close_gaps()
            _forget([paused])
        self._slots.forget()
        return advances

    def _next_chunk(self) -> PrefillChunk | None:
        sequence = self._slots.prefilling
        if sequence is None:
            return None
        start, num_prompt = sequence.num_cached, len(sequence.prompt_ids)
        num_left, num_decoding = sequence.num_to_read - start, len(self._slots.decoding)
        size = self.prefill_budget.take(start, num_left, num_decoding, self.num_waiting)
        if size == 0:
            return None
        stop = start + size
        if self._is_exact and sequence.num_reread:  # the answer came token by token
            stop = min(stop, num_prompt) if start < num_prompt else start + 1
        return PrefillChunk(sequence, self._slots.prefill_slot, start, sequence.tokens(start, stop))

    def _preempt(self) -> list[Sequence]:
        """As many as do not fit any more, the youngest first. The oldest always gets on."""
        preempted: list[Sequence] = []
        if self.arena.fits(self._slots.num_running, self._slots.longest):
            return preempted
        running = self._slots.running
        while not self.arena.fits(len(running), max(each.num_needed for each in running)):
            youngest = max(running, key=_turn)
            running = [sequence for sequence in running if sequence is not youngest]
            self._put_back(youngest)
            preempted.append(youngest)
        return preempted

    def _put_back(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self._waiting.put_back(sequence)
        if sequence.num_cached == sequence.num_reused and not sequence.output_ids:
            # In its first step: what the cache had of its prompt has spared it nothing.
            self._waiting.charge(sequence.owner, sequence.num_reused)
            sequence.num_reused = 0

    def _has_free_row(self) -> bool:
        return self._slots.num_running < self._limit.value

    def _admit(self) -> list[Move]:
        """Takes up the next sequence, if there is one that is still wanted and if it fits. Until
        it does nobody overtakes it. The moves of what the cache has of its prompt."""
        arena, num_rows = self.arena, self._slots.num_running + 1
        longest = self._slots.longest
        while self._waiting:
            sequence = self._waiting.first()
            if sequence.ended_by is not None:  # `end` was not told yet
                self._waiting.take()
                self._end(sequence)
                continue
            # With some room, or it might be preempted before it is read.
            if arena.fits(num_rows, max(longest, sequence.num_tokens + 1) + arena.limits.headroom):
                return self._start(self._waiting.take())
            break
        return []

    def _start(self, sequence: Sequence) -> list[Move]:
        sequence.num_reread = len(sequence.output_ids)
        moves = self._slots.start(sequence, self.arena.size.num_slots)
        if sequence.num_preemptions == 0:
            sequence.num_reused = sequence.num_cached
            self._waiting.charge(sequence.owner, len(sequence.prompt_ids) - sequence.num_reused)
            self._dequeued.append(sequence)
            self._num_admitted += 1
            sequence.turn = self._num_admitted
        left = sequence.max_output - sequence.num_reread
        sequence.num_expected = sequence.num_to_read + min(left, _EXPECTED_TOKENS)
        sequence.status = Status.RUNNING
        return moves

    def _resize(self, moves: list[Move]) -> Resize | None:
        """Appends to `moves` what it needs to have in place."""
        slots = self._slots
        if not slots.num_running:
            return None
        expected = slots.expected
        size = self.arena.resize(self._num_wanted_slots(expected), slots.longest, expected)
        if size is None:
            return None
        moves += slots.renew(*size)
        return Resize(*size, slots.filled())

    def _num_wanted_slots(self, expected: int) -> int:
        """A slot for each that runs. Those that keep something, and one for the next to come, only
        if there is room for `expected` tokens in them all."""
        slots = self._slots
        spare = slots.num_kept + 1 if slots.num_kept else 0
        fitting = min(slots.num_running + spare, self.arena.max_rows(expected))
        return max(slots.num_running, fitting)

    def _end_marked(self) -> None:
        """Ends the running sequences that the hub wants no more of."""
        for sequence in self._slots.running:
            if sequence.ended_by is not None and not sequence.is_finished:
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """One that the hub has marked."""
        assert sequence.ended_by is not None
        if sequence.status is Status.WAITING and sequence.num_preemptions == 0:
            self._dequeued.append(sequence)
        sequence.finish(sequence.ended_by)
        self._ended.append(Advance(sequence, None, sequence.ended_by))

    def _take_ended(self) -> list[Advance]:
        ended, self._ended = self._ended, []
        return ended


def _forget(preempted: list[Sequence]) -> None:
    """Their rows are gone."""
    for sequence in preempted:
        sequence.num_cached = 0
