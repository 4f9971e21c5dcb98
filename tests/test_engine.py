"""The whole engine on a stub model: who runs, in which row, until when, and what goes wrong."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine import Engine, Unobserved
from app.scheduler import Scheduler
from app.sequence import FinishReason, SamplingParams, Sequence, Status, StepPlan

from .engines import StubModel, TokenCache, answers, greedy, run, stub_answer, stub_engine


def test_answer_is_what_the_model_says_token_by_token() -> None:
    engine, _ = stub_engine()
    assert answers(engine, [greedy("a", [1, 2, 3], 5)]) == [stub_answer([1, 2, 3], 5)]


def test_together_is_as_alone() -> None:
    prompts = [[1], [2, 3], list(range(20)), [4] * 9, [5, 6], [7]]
    engine, _ = stub_engine()
    together = answers(engine, [greedy(str(i), p, 10) for i, p in enumerate(prompts)])
    assert together == [stub_answer(p, 10) for p in prompts]


def test_long_prompt_is_read_in_chunks_while_others_decode_every_step() -> None:
    engine, model = stub_engine(prefill_chunk=4)
    early, late = greedy("early", [1], 30), greedy("late", list(range(20)), 2)
    engine.submit(early)
    engine.step()
    engine.submit(late)
    for _ in range(5):
        engine.step()
    chunks = [plan.prefill for plan in model.plans[1:6]]
    assert [chunk and len(chunk.token_ids) for chunk in chunks] == [4, 4, 4, 4, 4]
    assert all(early in plan.decode for plan in model.plans[1:6])


def test_full_batch_defers_newcomer_until_a_row_is_free() -> None:
    engine, _ = stub_engine(max_batch_size=2)
    residents = [greedy("a", [1], 6), greedy("b", [2], 6)]
    newcomer = greedy("c", [3], 1)
    for sequence in [*residents, newcomer]:
        engine.submit(sequence)
    while not residents[0].is_finished:
        assert newcomer.status is Status.WAITING
        engine.step()
    run(engine)
    assert newcomer.output_ids == stub_answer([3], 1)


def test_waiting_sequences_start_in_the_order_they_came() -> None:
    engine, model = stub_engine(max_batch_size=1)
    answers(engine, [greedy(name, [1, 2], 3) for name in "abc"])
    started = [p.prefill.sequence.request_id for p in model.plans if p.prefill]
    assert started == ["a", "b", "c"]


def test_eos_ends_the_answer_with_stop() -> None:
    eos = stub_answer([1, 2, 3], 4)[-1]
    engine, _ = stub_engine(eos_ids=[eos])
    sequence = greedy("a", [1, 2, 3], 50)
    answers(engine, [sequence])
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.output_ids[-1] == eos
    assert eos not in sequence.output_ids[:-1]


def test_ignore_eos_runs_to_max_tokens() -> None:
    engine, _ = stub_engine(eos_ids=range(97))
    sequence = Sequence("a", [1], SamplingParams(max_tokens=9, ignore_eos=True))
    answers(engine, [sequence])
    assert (len(sequence.output_ids), sequence.finish_reason) == (9, FinishReason.LENGTH)


def test_context_end_ends_the_answer_with_length() -> None:
    engine, _ = stub_engine(max_model_len=12)
    sequence = greedy("a", [1] * 10, 50)
    answers(engine, [sequence])
    assert (sequence.num_tokens, sequence.finish_reason) == (12, FinishReason.LENGTH)


@pytest.mark.parametrize("steps_before", [0, 1, 2, 4])
def test_abort_ends_a_sequence_in_one_step_wherever_it_is(steps_before: int) -> None:
    """Waiting, reading its prompt (chunks of 8) or decoding."""
    engine, model = stub_engine()
    other, gone = greedy("other", [9], 12), greedy("gone", [1] * 20, 40)
    engine.submit(other)
    engine.submit(gone)
    for _ in range(steps_before):
        engine.step()
    gone.ended_by = FinishReason.ABORT
    engine.end(gone)
    engine.step()
    assert gone.finish_reason is FinishReason.ABORT
    assert gone not in model.plans[-1].sampled
    run(engine)
    assert other.output_ids == stub_answer([9], 12)


def test_model_failure_costs_only_the_sequences_of_that_step() -> None:
    engine, model = stub_engine(max_batch_size=1)
    failing, waiting = greedy("failing", [1], 5), greedy("waiting", [2], 5)

    def fail_once(plan: object, logits: object) -> None:
        model.change = lambda plan, logits: None
        raise RuntimeError("the device is lost")

    model.change = fail_once
    answers(engine, [failing, waiting])
    assert failing.finish_reason is FinishReason.ERROR
    assert failing.error is not None and "RuntimeError" in failing.error
    assert waiting.output_ids == stub_answer([2], 5)


def test_two_failed_steps_in_a_row_are_told_and_forgotten_on_success() -> None:
    engine, model = stub_engine(max_batch_size=1)
    outcomes = iter([True, True, False])

    def fail(plan: object, logits: object) -> None:
        if next(outcomes, False):
            raise RuntimeError

    model.change = fail
    counts = []
    for name in "abc":
        engine.submit(greedy(name, [1], 1))
        engine.step()
        counts.append(engine.has_failed)
    assert counts == [False, True, False]


def test_row_with_non_finite_logits_fails_alone() -> None:
    engine, model = stub_engine()
    sequences = [greedy(str(i), [i], 6) for i in range(3)]

    def spoil(plan: object, logits: object) -> None:
        for row, sequence in enumerate(plan.sampled):  # type: ignore[attr-defined]
            if sequence is sequences[1]:
                logits[row, 5] = float("nan")  # type: ignore[index]

    model.change = spoil
    answers(engine, sequences)
    assert sequences[1].finish_reason is FinishReason.ERROR
    assert [sequences[i].output_ids for i in (0, 2)] == [stub_answer([i], 6) for i in (0, 2)]


def test_every_sequence_finishes_exactly_once() -> None:
    engine, _ = stub_engine()
    sequences = [greedy(str(i), [i] * (i + 1), 1 + i % 3) for i in range(12)]
    for sequence in sequences:
        engine.submit(sequence)
    ends = Counter(d.sequence.request_id for d in run(engine) if d.finish_reason is not None)
    assert ends == Counter({str(i): 1 for i in range(12)})


def test_what_ended_before_a_step_is_told_though_the_step_fails_when_it_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = stub_engine()
    sequences = [greedy(str(i), [i], 20) for i in range(2)]
    for sequence in sequences:
        engine.submit(sequence)
    for _ in range(3):
        engine.step()
    sequences[0].ended_by = FinishReason.ABORT

    def fail(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr("app.scheduler.append", fail)
    reasons = {advance.sequence.request_id: advance.finish_reason for advance in engine.step()}
    assert reasons == {"0": FinishReason.ABORT, "1": FinishReason.ERROR}


def test_self_test_fails_when_the_model_does() -> None:
    engine, model = stub_engine()

    def fail(plan: object, logits: object) -> None:
        raise ValueError("broken")

    model.change = fail
    with pytest.raises(RuntimeError, match="ValueError"):
        engine.self_test()
    assert engine.has_failed  # of one alone: no client can be at fault


def test_self_test_behind_failed_decodes_runs_one() -> None:
    engine, model = stub_engine()

    def fail(plan: StepPlan, logits: object) -> None:
        if plan.decode:
            raise ValueError("broken")

    model.change = fail
    answers(engine, [greedy("a", [1]), greedy("b", [2])])
    answers(engine, [greedy("c", [3])])
    assert engine.has_failed
    with pytest.raises(RuntimeError, match="ValueError"):
        engine.self_test()
    model.change = lambda plan, logits: None
    engine.self_test()
    assert not engine.has_failed


def test_steps_with_a_row_that_can_be_trusted_are_good_ones() -> None:
    engine, model = stub_engine()
    for name in "abc":
        engine.submit(greedy(name, [1]))
    while len(model.plans) == 0 or len(model.plans[-1].decode) < 3:
        engine.step()

    def spoil(plan: StepPlan, logits: Any) -> None:
        logits[0] = np.nan

    model.change = spoil
    for num_rows in (3, 2):
        engine.step()
        assert len(model.plans[-1].decode) == num_rows
        assert not engine.has_failed


def test_chunk_that_is_not_the_last_says_nothing_of_the_model() -> None:
    engine, model = stub_engine(prefill_chunk=4)

    def fail(plan: StepPlan, logits: object) -> None:
        if plan.prefill is not None and plan.prefill.is_last:
            raise ValueError("broken")

    engine.submit(greedy("good", [1] * 20))
    for _ in range(4):
        engine.step()
        assert not engine.has_failed
    run(engine)
    model.change = fail
    for name, has_failed in (("first", False), ("second", True)):
        engine.submit(greedy(name, [1] * 20))
        run(engine)
        assert engine.has_failed == has_failed


arrivals = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps before it arrives
        st.integers(1, 25),  # prompt tokens
        st.integers(1, 12),  # max_tokens
        st.one_of(st.none(), st.integers(0, 15)),  # aborted so many steps after arrival
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(arrivals, st.integers(1, 4), st.integers(1, 9))
def test_any_arrivals_and_aborts_leave_the_answers_of_the_others_alone(
    plan: list[tuple[int, int, int, int | None]], max_batch_size: int, prefill_chunk: int
) -> None:
    """The stub checks in every step that each row holds exactly its sequence's ids."""
    engine, model = stub_engine(max_batch_size, 64, prefill_chunk)
    sequences: list[Sequence] = []
    aborts: dict[int, Sequence] = {}
    due = list(itertools.accumulate(wait for wait, *_ in plan))
    step = 0
    while step <= due[-1] or not engine.is_idle or aborts:
        for at, (_, num_prompt, num_tokens, abort_after) in zip(due, plan, strict=True):
            if at == step:
                name = str(len(sequences))
                sequences.append(greedy(name, [len(sequences)] * num_prompt, num_tokens))
                engine.submit(sequences[-1])
                if abort_after is not None:
                    aborts[step + abort_after] = sequences[-1]
        if step in aborts:
            gone = aborts.pop(step)
            gone.ended_by = FinishReason.ABORT
            engine.end(gone)
        engine.step()
        step += 1
        assert step < 2000, "a sequence never finishes"
    for sequence in sequences:
        assert sequence.is_finished
        expected = stub_answer(sequence.prompt_ids, sequence.params.max_tokens)
        if sequence.finish_reason is FinishReason.ABORT:
            expected = expected[: len(sequence.output_ids)]
        assert sequence.output_ids == expected
    assert all(len(plan.decode) <= max_batch_size for plan in model.plans)


class TimesTold(Unobserved):
    def __init__(self) -> None:
        self.times: list[tuple[float, float, float]] = []

    def timed(self, model_seconds: float, step_seconds: float, work_seconds: float) -> None:
        self.times.append((model_seconds, step_seconds, work_seconds))


class TickingModel(StubModel):
    """Takes half a second of a clock that otherwise stands still."""

    now = 100.0

    def forward(self, plan: StepPlan, cache: TokenCache) -> np.ndarray:
        self.now += 0.5
        return super().forward(plan, cache)


def test_time_with_work_counts_between_steps_and_not_while_idle() -> None:
    model, told = TickingModel(), TimesTold()
    scheduler, cache = Scheduler(4, 64, 8, frozenset()), TokenCache(4)
    engine = Engine(model, cache, scheduler, told, lambda: model.now)  # type: ignore[arg-type]
    for name in ("first", "second"):
        engine.submit(greedy(name, [1], 2))
        while not engine.is_idle:
            engine.step()
            model.now += 0.25
        model.now += 60
    assert told.times == [(0.5, 0.5, 0.5), (0.5, 0.5, 0.75)] * 2
