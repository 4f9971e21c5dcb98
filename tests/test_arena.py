"""The KV cache's size, and that no size, budget or preemption changes an answer.

On the stub model, whose cache holds token ids; it checks in every step that each row holds exactly
its sequence's, and that none is longer than its slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.arena import Arena, KVLimits, Size, default_max_rows
from app.engine import Engine
from app.memory import MemoryBudget
from app.sequence import FinishReason, Move, Resize, SamplingParams, Sequence, Status, StepPlan

from .engines import StubModel, TokenCache, answers, greedy, run, stub_answer, stub_engine

MAX_LEN, FIRST_LEN = 64, 4
LIMITS = KVLimits(8, MAX_LEN, FIRST_LEN, bytes_per_token=10, bytes_per_row=7, fixed_bytes=3)
ONE_ROW = LIMITS.num_bytes(1, MAX_LEN)  # what loading asks for at least


def arena(budget: int, limits: KVLimits = LIMITS) -> Arena:
    return Arena(limits, budget)


def elastic_engine(
    budget: int, limits: KVLimits = LIMITS, prefill_chunk: int = 8
) -> tuple[Engine, StubModel]:
    found = arena(budget, limits)
    return stub_engine(limits.max_rows, limits.max_len, prefill_chunk, arena=found)


def starts(model: StubModel) -> list[str]:
    """Who began to be read, or to be read again."""
    chunks = [plan.prefill for plan in model.plans if plan.prefill]
    return [chunk.sequence.request_id for chunk in chunks if chunk.start == 0]


@pytest.mark.parametrize(
    ("gib", "num_rows"), [(0, 4), (3.9, 4), (4, 4), (7.5, 7), (31.9, 31), (32, 32), (500, 32)]
)
def test_default_limit_is_a_row_for_each_gib_from_4_to_32(gib: float, num_rows: int) -> None:
    assert default_max_rows(int(gib * 2**30)) == num_rows


@pytest.mark.parametrize(
    ("num_tokens", "length"), [(1, 4), (4, 4), (5, 8), (9, 16), (33, 64), (64, 64), (70, 64)]
)
def test_buckets_double_up_to_the_longest_row(num_tokens: int, length: int) -> None:
    assert LIMITS.bucket(num_tokens) == length


def test_longest_bucket_need_not_be_a_double() -> None:
    limits = replace(LIMITS, max_len=50)
    assert [limits.bucket(n) for n in (32, 33, 50)] == [32, 50, 50]


@pytest.mark.parametrize(("vocab", "num_rows"), [(32_000, 8), (256_000, 6)])
def test_rows_that_fit_are_fewer_where_logits_are_wider(vocab: int, num_rows: int) -> None:
    limits = KVLimits(8, 2048, 256, 1000, bytes_per_row=4 * vocab, fixed_bytes=128 * 4 * vocab)
    budget = 150_000_000
    assert limits.rows_within(budget, 2048) == num_rows
    assert limits.num_bytes(num_rows, 2048) <= budget


def test_cache_begins_with_one_row_of_the_first_bucket() -> None:
    assert arena(10**6).size == Size(1, FIRST_LEN)


def test_slots_and_lengths_grow_by_doubling_and_stay() -> None:
    grown = arena(10**6)
    sizes = [
        grown.resize(rows, needed, needed) for rows, needed in ((1, 3), (2, 3), (3, 9), (4, 7))
    ]
    assert sizes == [None, Size(2, 4), Size(4, 16), None]


def test_room_for_the_expected_answer_is_made_at_once_where_there_is_some() -> None:
    wide, narrow = arena(10**6), arena(LIMITS.num_bytes(2, 8))
    assert wide.resize(2, 3, 30) == Size(2, 32)
    assert narrow.resize(2, 3, 30) == Size(2, 4)


def test_size_is_never_beyond_the_budget_though_it_was_longer_before() -> None:
    cache = arena(LIMITS.num_bytes(4, 16))
    assert cache.resize(1, 60, 60) == Size(1, 64)
    assert cache.resize(4, 16, 16) == Size(4, 16)


def test_cache_shrinks_only_after_it_was_twice_as_large_as_needed_for_long() -> None:
    cache = arena(10**6)
    cache.resize(8, 60, 60)
    assert [cache.resize(8, 33, 33) for _ in range(500)] == [None] * 500
    sizes = [cache.resize(8, 20, 20) for _ in range(199)]
    assert cache.resize(8, 40, 40) is None  # it begins anew
    sizes += [cache.resize(8, 20, 20) for _ in range(199)]
    assert sizes == [None] * 398
    assert cache.resize(8, 20, 20) == Size(8, 32)


def test_budget_that_shrinks_takes_the_cache_with_it_at_once() -> None:
    cache = arena(10**6)
    cache.resize(8, 60, 60)
    cache.budget = LIMITS.num_bytes(3, 16)
    assert cache.resize(2, 10, 10) == Size(2, 16)


def test_cache_at_rest_is_as_small_as_at_first() -> None:
    cache = arena(10**6)
    cache.resize(8, 60, 60)
    assert cache.rest() == Size(1, FIRST_LEN)


def test_lazy_cache_takes_all_rows_and_the_length_that_the_budget_permits() -> None:
    limits = replace(LIMITS, is_lazy=True)
    assert arena(10**6, limits).size == Size(8, 64)
    assert arena(LIMITS.num_bytes(8, 24), limits).size == Size(8, 16)
    assert arena(LIMITS.num_bytes(3, 4), limits).size.max_len == 4


def test_lazy_cache_does_not_follow_a_budget_that_comes_down_a_little() -> None:
    limits = replace(LIMITS, is_lazy=True)
    cache = arena(2 * LIMITS.num_bytes(8, 32), limits)
    for share in (0.97, 0.94, 0.99, 0.95):
        cache.budget = int(2 * share * LIMITS.num_bytes(8, 32))
        assert cache.resize(8, 10, 10) is None


def test_lazy_cache_that_found_no_memory_is_lazy_no_more() -> None:
    cache = arena(10**6, replace(LIMITS, is_lazy=True))
    cache.lose()
    assert cache.resize(2, 3, 3) == Size(2, 4)


def test_growing_rows_preempt_the_youngest_which_loses_no_token() -> None:
    budget = LIMITS.num_bytes(4, 16)
    engine, model = elastic_engine(max(budget, ONE_ROW))
    sequences = [greedy(str(i), [i] * 5, 40) for i in range(4)]
    found = answers(engine, sequences)
    assert found == [stub_answer([i] * 5, 40) for i in range(4)]
    preempted = [s.request_id for plan in model.plans for s in plan.preempted]
    assert preempted[:2] == ["3", "2"]
    assert sequences[0].num_preemptions == 0


def test_preempted_sequence_goes_in_front_of_its_owners_line() -> None:
    engine, model = elastic_engine(max(LIMITS.num_bytes(2, 32), ONE_ROW))
    sequences = [greedy(str(i), [i] * 5, 40) for i in range(4)]
    answers(engine, sequences)
    preempted = [s.request_id for plan in model.plans for s in plan.preempted]
    assert preempted == ["3", "2", "1", "3"]
    assert starts(model) == ["0", "1", "2", "3", "1", "2", "3", "3"]


def test_nobody_overtakes_one_that_does_not_fit_yet() -> None:
    engine, model = elastic_engine(max(LIMITS.num_bytes(2, 32), ONE_ROW))
    long, next_ = greedy("long", [1] * 20, 10), greedy("next", [2] * 40, 5)
    answers(engine, [long, next_, greedy("s", [3])])
    assert starts(model) == ["long", "next", "s"]


def test_newcomer_that_would_have_to_give_way_after_a_token_waits() -> None:
    limits = KVLimits(4, 64, 16, bytes_per_token=1, bytes_per_row=0)
    engine, _ = elastic_engine(limits.num_bytes(2, 32), limits)
    sequences = [greedy("first", [1] * 4, 20), greedy("next", [2] * 31, 5)]
    answers(engine, sequences)
    assert [s.num_preemptions for s in sequences] == [0, 0]


def test_owner_pays_for_a_prompt_once() -> None:
    engine, _ = elastic_engine(max(LIMITS.num_bytes(2, 32), ONE_ROW))
    sequences = [Sequence(o, [1] * 5, SamplingParams(40), owner=o) for o in "ab"]
    answers(engine, sequences)
    assert sequences[1].num_preemptions > 0
    served = engine._scheduler._waiting._served
    assert served["a"] == served["b"] == 45


def test_preempted_sequence_that_is_ended_while_it_waits_is_told_once() -> None:
    engine, _ = elastic_engine(max(LIMITS.num_bytes(2, 32), ONE_ROW))
    sequences = [greedy(str(i), [i] * 5, 50) for i in range(2)]
    for sequence in sequences:
        engine.submit(sequence)
    while sequences[1].num_preemptions == 0:
        engine.step()
    assert sequences[1].status is Status.WAITING
    sequences[1].ended_by = FinishReason.ABORT
    engine.end(sequences[1])
    advances = [a for a in run(engine) if a.sequence is sequences[1]]
    assert [(a.token_id, a.finish_reason) for a in advances] == [(None, FinishReason.ABORT)]


@pytest.mark.parametrize("is_lazy", [False, True])
def test_answer_that_outgrows_what_was_expected_of_it_gets_a_longer_slot(is_lazy: bool) -> None:
    limits = KVLimits(2, 1024, 64, bytes_per_token=10, bytes_per_row=0, is_lazy=is_lazy)
    engine, _ = elastic_engine(limits.num_bytes(2, 512), limits)
    sequences = [greedy(str(i), [i] * 5, 600) for i in range(2)]
    assert answers(engine, sequences) == [stub_answer([i] * 5, 600) for i in range(2)]
    assert engine._scheduler.arena.size.max_len == 1024


def test_limit_and_its_reason_follow_the_memory() -> None:
    engine, _ = elastic_engine(10**6)
    engine.submit(greedy("a", [1] * 20, 40))
    engine.step()
    scheduler = engine._scheduler
    seen = []
    for budget in (10**6, LIMITS.num_bytes(3, 32), 1):
        scheduler.arena.budget = budget
        seen.append((scheduler.usage.batch_limit, scheduler.usage.why_limited))
    assert seen == [(8, "cap"), (3, "memory"), (1, "memory")]
    scheduler.arena.budget = 10**6
    scheduler._limit.halve(8)
    assert (scheduler.usage.batch_limit, scheduler.usage.why_limited) == (4, "out of memory")


def test_row_that_runs_beyond_the_budget_uses_all_of_it_and_no_more() -> None:
    """What an autoscaler goes by is the larger of that and the rows."""
    engine, _ = elastic_engine(0)
    engine.submit(greedy("a", [1] * 20, 40))
    for _ in range(5):
        engine.step()
    assert engine._scheduler.usage.num_tokens > 0
    assert engine._scheduler.usage.ratio == 1.0


def refuse(cache: TokenCache, *num_slots: int) -> None:
    """Memory runs out as the cache is to have so many slots, the first time each."""
    left, resize = list(num_slots), cache.resize

    def change(asked: Resize) -> None:
        if asked.num_slots in left:
            left.remove(asked.num_slots)
            cache.rows = []
            raise MemoryError
        resize(asked)

    cache.resize = change  # type: ignore[method-assign]


def test_cache_that_finds_no_memory_to_grow_costs_time_and_rows_but_no_token() -> None:
    engine, model = elastic_engine(10**6)
    refuse(engine._cache, 4)  # type: ignore[arg-type]
    sequences = [greedy(str(i), [i] * 5, 40) for i in range(6)]
    assert answers(engine, sequences) == [stub_answer([i] * 5, 40) for i in range(6)]
    assert max(plan.num_rows for plan in model.plans) < 4
    assert [s.num_preemptions for s in sequences] == [1, 1, 1, 0, 0, 0]
    assert starts(model) == ["0", "1", "0", "1", "2", "3", "4", "5"]


def test_one_row_that_finds_no_memory_fails_alone() -> None:
    engine, _ = elastic_engine(10**6)
    refuse(engine._cache, 1)  # type: ignore[arg-type]
    found = answers(engine, [greedy("long", [1] * 5, 40), greedy("next", [2], 5)])
    assert found == [[], stub_answer([2], 5)]


def test_other_failures_of_a_resize_end_what_ran_and_nothing_else() -> None:
    engine, _ = elastic_engine(10**6)
    resize = engine._cache.resize

    def fail(asked: Resize) -> None:
        engine._cache.resize = resize  # type: ignore[method-assign]
        raise ValueError("broken")

    sequences = [greedy(str(i), [i] * 5, 30) for i in range(3)]
    for sequence in sequences:
        engine.submit(sequence)
    engine.step()
    engine._cache.resize = fail  # type: ignore[method-assign]
    run(engine)
    assert [s.finish_reason for s in sequences[:2]] == [FinishReason.ERROR] * 2
    assert sequences[2].output_ids == stub_answer([2] * 5, 30)


def test_what_rows_have_written_is_held_until_the_cache_is_made_anew() -> None:
    engine, _ = stub_engine(min_shared=None)
    scheduler = engine._scheduler
    answers(engine, [greedy("long", [1] * 20, 5)])
    assert scheduler.num_written == 24  # the last token of an answer is never cached
    engine.submit(greedy("short", [2] * 3, 2))
    engine.step()
    assert scheduler.num_written == 24
    run(engine)
    assert scheduler.num_written == 24
    answers(engine, [greedy("first", [3] * 6, 12), greedy("beside", [4] * 8, 2)])
    assert scheduler.num_written == 24 + 9
    engine.rest()
    assert scheduler.num_written == 0


@pytest.mark.parametrize("error", [ValueError("broken"), MemoryError()], ids=repr)
def test_moves_that_fail_in_front_of_a_resize_leave_no_slot_that_is_not_there(
    error: Exception,
) -> None:
    engine, _ = elastic_engine(10**6)
    apply = engine._cache.apply

    def fail(moves: Iterable[Move]) -> None:
        engine._cache.apply = apply  # type: ignore[method-assign]
        raise error

    first, second, third = greedy("1", [1] * 5, 3), greedy("2", [2] * 5, 9), greedy("3", [3], 40)
    engine.submit(first)
    engine.submit(second)
    while not first.is_finished:
        engine.step()
    engine._cache.apply = fail  # type: ignore[method-assign]
    engine.submit(third)  # in the step in which the second takes the first one's row
    run(engine)
    found = FinishReason.LENGTH if isinstance(error, MemoryError) else FinishReason.ERROR
    assert [second.finish_reason, third.finish_reason] == [found] * 2
    sequences = [greedy(str(i), [i] * 5, 40) for i in range(2)]
    assert answers(engine, sequences) == [stub_answer([i] * 5, 40) for i in range(2)]


def test_idle_engine_gives_memory_back_once_when_it_is_due() -> None:
    now = 0.0
    engine, _ = elastic_engine(10**6)
    engine._clock, engine._idle_seconds = (lambda: now), 60.0
    engine.self_test()
    assert engine.seconds_to_rest is None  # there was no work yet
    answers(engine, [greedy(str(i), [i] * 20, 9) for i in range(4)])
    now = 45.0
    engine.self_test()  # which is no work
    assert engine.seconds_to_rest == 15.0
    now = 60.0
    engine.rest()
    assert engine._scheduler.arena.size == Size(1, FIRST_LEN)
    assert engine.seconds_to_rest is None
    assert answers(engine, [greedy("a", [7] * 20, 9)]) == [stub_answer([7] * 20, 9)]


class Machine:
    """Memory that is shared with others; the cache may have 80 % of what they leave."""

    def __init__(self, num_bytes: int) -> None:
        self.now = 0.0
        self.num_bytes, self.num_others = num_bytes, 0
        self.is_broken = False
        self.engine: Engine | None = None
        budget = MemoryBudget(self.read_free, 0.8, clock=lambda: self.now)
        limits = replace(LIMITS, max_rows=16)
        self.engine, self.model = elastic_engine(budget.update(0), limits)
        self.engine._clock, self.engine._budget = (lambda: self.now), budget.update
        self.engine._cache.bytes_held = lambda _: self.held  # type: ignore[method-assign]
        self._limits: list[int] = []
        self._num_asked = 0

    @property
    def held(self) -> int:
        engine = self.engine
        return LIMITS.num_bytes(*engine._scheduler.arena.size) if engine is not None else 0

    def read_free(self) -> int:
        if self.is_broken:
            raise OSError("the device does not answer")
        return self.num_bytes - self.num_others - self.held

    def run(self, seconds: float) -> list[int]:
        """The limit after each step, under a steady load of short answers."""
        engine, limits = self.engine, []
        assert engine is not None
        until = self.now + seconds
        while self.now < until:
            if engine._scheduler.num_waiting < 4:
                self._num_asked += 1
                engine.submit(greedy("", [self._num_asked] * 4, 12))
            engine.step()
            self.now += 0.1
            limits.append(engine._scheduler.batch_limit)
            assert self.held <= self.num_bytes - self.num_others, "others have that"
        return limits


ROWS_10 = int(LIMITS.num_bytes(10, 16) / 0.8) + 1


def test_own_growth_is_not_taken_for_memory_that_others_took() -> None:
    machine = Machine(ROWS_10)
    assert set(machine.run(40)[100:]) == {10}
    assert max(plan.num_rows for plan in machine.model.plans) == 10


def test_memory_that_others_take_costs_rows_at_once_and_comes_back_once() -> None:
    machine = Machine(ROWS_10)
    machine.run(20)
    machine.num_others = int(LIMITS.num_bytes(2, 16))
    fewer = machine.run(20)
    assert set(fewer[12:]) == {8}  # after a second
    machine.num_others = 0
    more = machine.run(20)
    assert set(more) == {8, 10}
    assert more == sorted(more)  # up, and never down again


def test_memory_that_cannot_be_read_any_more_changes_nothing() -> None:
    machine = Machine(ROWS_10)
    machine.run(20)
    machine.is_broken = True
    assert set(machine.run(20)) == {10}


arrivals = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps before it arrives
        st.integers(1, 40),  # prompt tokens
        st.integers(1, 24),  # max_tokens
        st.one_of(st.none(), st.integers(0, 25)),  # aborted so many steps after arrival
        st.sampled_from("ab"),  # owner
    ),
    min_size=1,
    max_size=12,
)
budgets = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 9 * ONE_ROW)), min_size=1, max_size=8
)


@settings(max_examples=120, deadline=None)
@given(arrivals, budgets, st.integers(1, 6), st.integers(1, 9), st.booleans())
def test_any_budgets_leave_every_answer_as_it_is_alone(
    plan: list[tuple[int, int, int, int | None, str]],
    series: list[tuple[int, int]],
    max_rows: int,
    prefill_chunk: int,
    is_lazy: bool,
) -> None:
    limits = replace(LIMITS, max_rows=max_rows, is_lazy=is_lazy)
    engine, model = elastic_engine(series[0][1], limits, prefill_chunk)
    budget_of_step = [budget for steps, budget in series for _ in range(steps)]
    scheduler = engine._scheduler
    due = list(itertools.accumulate(wait for wait, *_ in plan))
    aborts: dict[int, Sequence] = {}
    sequences: list[Sequence] = []
    told: list[tuple[Sequence, int | None, FinishReason | None]] = []
    step = 0
    while step <= due[-1] or not engine.is_idle or aborts:
        for at, (_, num_prompt, num_tokens, abort_after, owner) in zip(due, plan, strict=True):
            if at == step:
                params = SamplingParams(num_tokens)
                prompt = [len(sequences)] * num_prompt
                sequences.append(Sequence(str(len(sequences)), prompt, params, owner=owner))
                engine.submit(sequences[-1])
                if abort_after is not None:
                    aborts[step + abort_after] = sequences[-1]
        if step in aborts:
            gone = aborts.pop(step)
            gone.ended_by = gone.ended_by or FinishReason.ABORT
            engine.end(gone)
        scheduler.arena.budget = budget_of_step[min(step, len(budget_of_step) - 1)]
        num_plans = len(model.plans)
        told += [(a.sequence, a.token_id, a.finish_reason) for a in engine.step()]
        for made in model.plans[num_plans:]:
            check_plan(made, scheduler.arena, max_rows)
        step += 1
        assert step < 6000, "a sequence never finishes"
    for sequence in sequences:
        assert sequence.is_finished
        mine = [(token_id, reason) for who, token_id, reason in told if who is sequence]
        assert [token_id for token_id, _ in mine if token_id is not None] == sequence.output_ids
        assert [reason for _, reason in mine if reason is not None] == [sequence.finish_reason]
        expected = stub_answer(sequence.prompt_ids, sequence.max_output)
        if sequence.finish_reason is FinishReason.ABORT:
            expected = expected[: len(sequence.output_ids)]
        assert sequence.output_ids == expected
    oldest = [s for s in sequences if s.turn == 1]
    assert all(s.num_preemptions == 0 for s in oldest)


def check_plan(plan: StepPlan, arena: Arena, max_rows: int) -> None:
    assert plan.num_rows <= max_rows
    if plan.num_rows > 1:
        longest = max(s.num_cached for s in plan.decode) if plan.decode else 0
        assert arena.limits.num_bytes(plan.num_rows, arena.limits.bucket(longest)) <= arena.budget
        assert arena.limits.num_bytes(*arena.size) <= arena.budget
    assert arena.size.num_slots >= plan.num_rows
