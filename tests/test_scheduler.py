"""The plan of a step: rows, moves and chunks. What they lead to is in test_engine."""

from __future__ import annotations

import numpy as np
import pytest

from app.sampler import Sampled
from app.scheduler import Scheduler
from app.sequence import FinishReason, Move, SamplingParams, Sequence, StepPlan

from .engines import greedy, run, stub_engine


def scheduler_with(num_decoding: int, max_batch_size: int = 8) -> tuple[Scheduler, list[Sequence]]:
    """Sequences of 3, 4, 5, … prompt tokens that have one token each."""
    scheduler = Scheduler(max_batch_size, 100, 50, frozenset())
    sequences = [greedy(str(i), [7] * (3 + i), 50) for i in range(num_decoding)]
    for sequence in sequences:
        scheduler.add(sequence)
        step(scheduler, decode=False)
    return scheduler, sequences


def step(scheduler: Scheduler, decode: bool = True) -> StepPlan:
    """One step in which every row gets token 1; without `decode`, only the prefill's."""
    plan = scheduler.plan()
    if not decode:
        plan = StepPlan(plan.moves, plan.prefill, [])
    rows = len(plan.sampled)
    scheduler.commit(
        plan, Sampled(np.ones(rows, np.int64), np.ones(rows, np.bool_), np.ones(rows, np.bool_), {})
    )
    return plan


def names(plan: StepPlan) -> list[str]:
    return [sequence.request_id for sequence in plan.decode]


def test_rows_are_in_the_order_of_admission() -> None:
    scheduler, _ = scheduler_with(4)
    assert names(scheduler.plan()) == ["0", "1", "2", "3"]


def test_last_row_takes_the_place_of_one_that_has_ended() -> None:
    scheduler, sequences = scheduler_with(4)
    sequences[1].finish(FinishReason.STOP)
    plan = scheduler.plan()
    assert names(plan) == ["0", "3", "2"]
    assert plan.moves == [Move(source=3, target=1, num_tokens=sequences[3].num_cached)]


def test_last_row_that_ends_moves_nothing() -> None:
    scheduler, sequences = scheduler_with(3)
    sequences[2].finish(FinishReason.STOP)
    plan = scheduler.plan()
    assert (names(plan), plan.moves) == (["0", "1"], [])


def test_neighbours_that_end_together_leave_no_gap() -> None:
    scheduler, sequences = scheduler_with(5)
    for index in (0, 1, 4):
        sequences[index].finish(FinishReason.STOP)
    plan = scheduler.plan()
    assert names(plan) == ["3", "2"]
    assert [(move.source, move.target) for move in plan.moves] == [(3, 0), (2, 1)]


def test_prefill_closes_up_behind_the_rows_that_are_left() -> None:
    scheduler, sequences = scheduler_with(3)
    scheduler.add(greedy("long", [7] * 120, 5))
    assert step(scheduler).prefill is not None
    sequences[0].finish(FinishReason.STOP)
    plan = scheduler.plan()
    assert [(m.source, m.target, m.num_tokens) for m in plan.moves] == [
        (2, 0, sequences[2].num_cached),
        (3, 2, 50),
    ]
    assert plan.prefill is not None
    assert (plan.prefill.row, plan.prefill.start) == (2, 50)


def test_prompt_is_cut_into_chunks_and_sampled_at_its_last() -> None:
    scheduler = Scheduler(2, 200, 50, frozenset())
    scheduler.add(greedy("long", [7] * 120, 5))
    plans = [step(scheduler) for _ in range(3)]
    chunks = [(p.prefill.start, len(p.prefill.token_ids)) for p in plans if p.prefill]
    assert chunks == [(0, 50), (50, 50), (100, 20)]
    assert [len(plan.sampled) for plan in plans] == [0, 0, 1]


def test_one_prompt_is_read_at_a_time() -> None:
    scheduler = Scheduler(4, 200, 50, frozenset())
    for name in "ab":
        scheduler.add(greedy(name, [7] * 80, 5))
    readers = [
        p.prefill.sequence.request_id for p in (step(scheduler) for _ in range(4)) if p.prefill
    ]
    assert readers == ["a", "a", "b", "b"]


def test_idle_scheduler_plans_nothing() -> None:
    scheduler = Scheduler(4, 200, 50, frozenset())
    assert scheduler.is_idle
    assert scheduler.plan().is_empty


@pytest.mark.parametrize("num_before", [0, 2, 5])
@pytest.mark.parametrize(
    "reason", [FinishReason.STOP, FinishReason.TIMEOUT, FinishReason.ABORT], ids=str
)
def test_sequence_that_the_hub_ends_takes_no_further_step(
    reason: FinishReason, num_before: int
) -> None:
    """Waiting, reading its prompt or decoding."""
    engine, model = stub_engine(prefill_chunk=2)
    sequence = greedy("a", [1, 2, 3, 4, 5], 50)
    engine.submit(sequence)
    for _ in range(num_before):
        engine.step()
    sequence.ended_by = reason
    advances = run(engine)
    assert [(a.token_id, a.finish_reason) for a in advances] == [(None, reason)]
    assert (sequence.finish_reason, len(model.plans)) == (reason, num_before)


@pytest.mark.parametrize(
    ("ignore_eos", "stop_token_ids", "ends"),
    [(False, (), {3}), (False, (4,), {3, 4}), (True, (), set()), (True, (4,), {4})],
)
def test_ends_are_the_models_and_the_requests(
    ignore_eos: bool, stop_token_ids: tuple[int, ...], ends: set[int]
) -> None:
    scheduler = Scheduler(4, 100, 50, frozenset({3}))
    params = SamplingParams(9, ignore_eos=ignore_eos, stop_token_ids=frozenset(stop_token_ids))
    sequence = Sequence("a", [1], params)
    scheduler.add(sequence)
    assert sequence.end_ids == ends


class Countdown:
    """A constraint that is complete after so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.accepted: list[int] = []
        self._num_tokens = num_tokens

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    @property
    def is_complete(self) -> bool:
        return len(self.accepted) >= self._num_tokens


def test_grammar_hears_of_every_token_and_ends_the_answer_when_it_is_complete() -> None:
    scheduler, [sequence] = scheduler_with(1)
    sequence.constraint = constraint = Countdown(3)  # type: ignore[assignment]
    while not sequence.is_finished:
        step(scheduler)
    assert constraint.accepted == [1, 1, 1]
    assert sequence.finish_reason is FinishReason.STOP
