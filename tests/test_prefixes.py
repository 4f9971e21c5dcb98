"""What the cache has of a prompt already is not read again, and no answer changes by that.

On the stub model, whose cache holds token ids and whose answers depend on all of a row: it checks
in every run that each row holds exactly its sequence's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from app.arena import Arena, KVLimits
from app.engine import Engine
from app.metrics import Metrics
from app.prefixes import as_ids, joined, longest, num_shared
from app.sequence import FinishReason, Sequence

from .engines import StubModel, answers, greedy, run, stub_answer, stub_engine
from .test_arena import LIMITS, ONE_ROW

HISTORY = list(range(10, 30))


def ask(
    engine: Engine, prompt: list[int], num_tokens: int = 5, owner: str = "", name: str = ""
) -> Sequence:
    """Alone, to its end; its answer must be what it would have been."""
    sequence = greedy(name or str(len(prompt)), prompt, num_tokens)
    sequence.owner = owner
    engine.submit(sequence)
    run(engine)
    assert sequence.output_ids == stub_answer(prompt, num_tokens)
    return sequence


def num_read(model: StubModel, sequence: Sequence) -> int:
    chunks = [plan.prefill for plan in model.plans if plan.prefill]
    return sum(len(chunk.token_ids) for chunk in chunks if chunk.sequence is sequence)


@pytest.mark.parametrize(
    ("some", "others", "num"),
    [([], [], 0), ([1], [], 0), ([1], [2], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2, 4, 5], 2)],
)
def test_shared_prefix_ends_at_the_first_difference(
    some: list[int], others: list[int], num: int
) -> None:
    assert num_shared(as_ids(some), as_ids(others)) == num
    assert num_shared(as_ids(others), as_ids(some)) == num


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
def test_shared_prefix_is_the_longest(some: list[int], others: list[int]) -> None:
    expected = next(n for n in range(min(len(some), len(others)), -1, -1) if some[:n] == others[:n])
    assert num_shared(as_ids(some), as_ids(others)) == expected


def test_place_is_where_most_lies_and_of_equals_the_shortest() -> None:
    prompt = as_ids([1, 2, 3, 4, 5, 6])
    places = {0: [1, 2, 9], 1: [1, 2, 3, 4, 9, 9, 9], 2: [1, 2, 3, 4, 9], 3: [2, 3, 4, 5]}
    found = longest(prompt, [(slot, as_ids(ids)) for slot, ids in places.items()], 2)
    assert found == (4, 1, 2)


def test_last_two_tokens_of_a_prompt_are_read_whatever_the_cache_has() -> None:
    ids = as_ids([1, 2, 3, 4])
    assert longest(ids, [(0, joined(ids, [5]))], 2) == (2, 3, 0)


def test_look_through_many_long_rows_takes_no_loop_over_tokens() -> None:
    """64 slots of 8,000 tokens that differ in the last one: thousands of such looks a second would
    be a loop's work of minutes."""
    prompt = np.arange(8000, dtype=np.int32)
    places = [(slot, np.append(prompt[:-2], np.int32(slot))) for slot in range(64)]
    for _ in range(100):
        assert longest(prompt, places, 32) == (7998, 1, 0)


def test_next_turn_of_a_conversation_reads_only_what_is_new() -> None:
    engine, model = stub_engine(max_model_len=200)
    prompt = HISTORY
    for _ in range(5):
        turn = ask(engine, prompt)
        assert num_read(model, turn) <= len(HISTORY)
        prompt = [*prompt, *turn.output_ids, 7, 8, 9]
    assert num_read(model, turn) == 4  # the last token of the answer before, and the new ones
    assert turn.num_reused == len(turn.prompt_ids) - 4
    assert not any(plan.moves for plan in model.plans)  # taken over where it lies


def test_same_prompt_again_reads_its_last_two_tokens_only() -> None:
    engine, model = stub_engine()
    ask(engine, HISTORY)
    assert num_read(model, ask(engine, HISTORY)) == 2


def test_prefix_that_is_too_short_is_read_again() -> None:
    engine, model = stub_engine(min_shared=10)
    ask(engine, [*HISTORY[:9], 1, 1, 1, 1])
    assert ask(engine, [*HISTORY[:9], 2, 2, 2]).num_reused == 0


def test_without_the_cache_all_is_read() -> None:
    engine, model = stub_engine(min_shared=None)
    ask(engine, HISTORY)
    assert num_read(model, ask(engine, HISTORY)) == len(HISTORY)


def test_prefix_of_a_running_row_is_copied() -> None:
    engine, model = stub_engine()
    first, second = greedy("a", [*HISTORY, 1], 20), greedy("b", [*HISTORY, 2], 20)
    assert answers(engine, [first, second]) == [
        stub_answer([*HISTORY, 1], 20),
        stub_answer([*HISTORY, 2], 20),
    ]
    assert (first.num_reused, second.num_reused) == (0, len(HISTORY) - 1)


def test_common_beginning_is_copied_and_what_follows_it_is_kept() -> None:
    """A system prompt: the conversation that came first goes on afterwards."""
    engine, model = stub_engine()
    first = ask(engine, [*HISTORY, 1, 1, 1, 1])
    assert ask(engine, [*HISTORY, 2, 2, 2, 2]).num_reused == len(HISTORY)
    again = ask(engine, [*first.prompt_ids, *first.output_ids, 7])
    assert again.num_reused == len(first.prompt_ids) + 4


def test_prompt_without_a_match_takes_an_empty_slot_then_the_one_used_longest_ago() -> None:
    engine, model = stub_engine(max_batch_size=3)
    prompts = [[i] * 8 for i in range(1, 5)]
    for prompt in prompts[:3]:
        ask(engine, prompt, 1)
    assert (
        ask(engine, [*prompts[0], 9, 9], 1).num_reused == 8
    )  # all three are there; 2 is the oldest
    ask(engine, prompts[3], 1)
    reused = [ask(engine, [*prompts[i], 9, 9], 1).num_reused for i in (0, 2, 3, 1)]
    assert reused == [8, 8, 8, 0]


def test_rows_that_end_among_others_keep_what_they_have() -> None:
    engine, model = stub_engine(max_batch_size=8)
    prompts = [[i] * 8 for i in range(1, 6)]
    found = answers(engine, [greedy(str(i), p, 3 + 4 * i) for i, p in enumerate(prompts)])
    assert found == [stub_answer(p, 3 + 4 * i) for i, p in enumerate(prompts)]
    assert any(move.num_back for plan in model.plans for move in plan.moves)
    assert [ask(engine, [*p, 9, 9]).num_reused for p in prompts] == [8] * 5


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_cancelled_request_leaves_what_was_read_of_it(num_tokens: int) -> None:
    engine, model = stub_engine()
    sequence = greedy("a", HISTORY, 40)
    engine.submit(sequence)
    engine.step()  # a chunk of 8 tokens
    while len(sequence.output_ids) < num_tokens:
        engine.step()
    sequence.ended_by = FinishReason.ABORT
    run(engine)
    num = 8 if num_tokens == 0 else len(HISTORY) - 2
    assert ask(engine, HISTORY).num_reused == num


def test_failed_step_leaves_nothing_that_could_be_trusted() -> None:
    engine, model = stub_engine()
    ask(engine, HISTORY)
    calls = count()

    def change(plan: object, logits: object) -> None:
        if next(calls) == 0:
            raise RuntimeError

    model.change = change
    answers(engine, [greedy("b", [5] * 8)])
    assert ask(engine, HISTORY).num_reused == 0


def test_request_that_is_put_back_in_its_first_step_has_read_all_of_its_prompt() -> None:
    engine, _ = stub_engine()
    ask(engine, HISTORY)
    running, late = greedy("a", [3] * 5, 20), greedy("b", HISTORY, 5)
    engine.submit(running)
    engine.step()
    apply = engine._cache.apply

    def fail(moves: object) -> None:
        engine._cache.apply = apply  # type: ignore[method-assign]
        assert late.num_reused > 0
        raise MemoryError

    engine._cache.apply = fail  # type: ignore[method-assign]
    engine.submit(late)
    run(engine)
    assert (late.num_preemptions, late.num_reused) == (1, 0)
    assert late.output_ids == stub_answer(HISTORY, 5)


def test_prompt_that_pauses_in_a_step_that_fails_is_read_anew() -> None:
    engine, model = stub_engine()
    running, paused = greedy("a", [3] * 5, 20), greedy("b", HISTORY, 5)
    engine.submit(running)
    engine.step()
    engine.submit(paused)
    engine.step()
    assert 0 < paused.num_cached < len(HISTORY)
    budget = engine._scheduler.prefill_budget
    take, budget.take = budget.take, lambda *_: 0  # type: ignore[method-assign]

    def change(plan: object, logits: object) -> None:
        engine._cache.rows = [[] for _ in range(4)]  # type: ignore[attr-defined]
        raise RuntimeError

    model.change = change
    engine.step()
    model.change, budget.take = (lambda plan, logits: None), take  # type: ignore[method-assign]
    run(engine)
    assert running.finish_reason is FinishReason.ERROR
    assert paused.output_ids == stub_answer(HISTORY, 5)


def test_memory_that_moved_rows_have_taken_counts_after_a_failed_step() -> None:
    """Or the budget, which is what is free and what the cache holds, would be less from then on."""
    engine, model = stub_engine()
    ask(engine, HISTORY)
    before = engine._scheduler.num_written

    def change(plan: object, logits: object) -> None:
        raise RuntimeError

    model.change = change
    answers(engine, [greedy("b", [5] * 8)])  # what is kept goes to another slot, and stays in this
    assert engine._scheduler.num_written == 2 * before > 2 * len(HISTORY)


def test_request_whose_logits_are_not_finite_leaves_nothing() -> None:
    engine, model = stub_engine()

    def change(plan: object, logits: np.ndarray) -> None:
        logits[:] = np.nan

    model.change = change
    answers(engine, [greedy("a", HISTORY)])
    model.change = lambda plan, logits: None
    assert ask(engine, HISTORY).num_reused == 0


def test_nothing_is_shared_between_owners() -> None:
    engine, model = stub_engine()
    ask(engine, HISTORY, owner="ann")
    assert ask(engine, HISTORY, owner="bob").num_reused == 0
    assert ask(engine, HISTORY, owner="ann").num_reused == len(HISTORY) - 2


def test_running_row_is_not_shared_with_another_owner() -> None:
    engine, model = stub_engine()
    first, second = greedy("a", HISTORY, 20), greedy("b", HISTORY, 20)
    first.owner, second.owner = "ann", "bob"
    answers(engine, [first, second])
    assert second.num_reused == 0


def test_owner_is_charged_for_what_is_read() -> None:
    engine, model = stub_engine()
    served = engine._scheduler._waiting._served
    ask(engine, HISTORY, owner="ann")
    assert served["ann"] == len(HISTORY) + 5
    ask(engine, HISTORY, owner="ann")
    assert served["ann"] == len(HISTORY) + 5 + 2 + 5


def test_kept_rows_make_room_before_a_request_waits_or_is_preempted() -> None:
    """With them the budget has room for one row of this length only."""
    arena = Arena(LIMITS, max(ONE_ROW, LIMITS.num_bytes(2, 16)))
    engine, model = stub_engine(8, 64, arena=arena)
    for i in range(1, 9):
        ask(engine, [i] * 8, 3)
    long = [greedy(str(i), [i] * 12, 4) for i in (20, 21)]
    assert answers(engine, long) == [stub_answer([i] * 12, 4) for i in (20, 21)]
    assert not any(plan.preempted for plan in model.plans)
    assert max(plan.num_rows for plan in model.plans) == 2


def test_cache_stays_as_long_as_what_it_keeps_while_there_is_room() -> None:
    """However many short requests come meanwhile."""
    engine, model = stub_engine(8, 64, arena=Arena(LIMITS, 10**6), min_shared=20)
    answers(engine, [greedy("", [i] * 4) for i in range(3)])  # so that there are several slots
    long = ask(engine, list(range(10, 50)))
    before = engine.num_steps
    for _ in range(40):
        ask(engine, [3] * 4, 8)
    assert engine.num_steps > before + 250
    again = ask(engine, [*long.prompt_ids, *long.output_ids, 7])
    assert again.num_reused == len(long.prompt_ids) + 4


def test_budget_that_falls_keeps_what_was_used_last() -> None:
    arena = Arena(replace(LIMITS, is_lazy=True), 10**6)
    engine, model = stub_engine(8, 64, arena=arena)
    prompts = [[i] * 8 for i in range(1, 9)]
    answers(engine, [greedy(str(i), prompt, 3) for i, prompt in enumerate(prompts)])
    last = ask(engine, [*prompts[0], 9, 9])
    assert last.num_reused == 8
    arena.budget = ONE_ROW
    ask(engine, [*prompts[7], 9, 9])  # in whose course the cache becomes smaller
    assert arena.size.num_slots < 8
    assert ask(engine, [*last.prompt_ids, 9, 9]).num_reused == 10


def test_pause_keeps_the_rows_and_rest_does_not() -> None:
    now = [0.0]
    engine, model = stub_engine()
    engine._clock, engine._idle_seconds = lambda: now[0], 60.0
    ask(engine, HISTORY)
    now[0] = 30.0
    assert engine.seconds_to_rest == 30.0
    assert ask(engine, HISTORY).num_reused == len(HISTORY) - 2
    engine.rest()
    assert ask(engine, HISTORY).num_reused == 0


def test_self_test_costs_no_conversation_its_row() -> None:
    engine, model = stub_engine(max_batch_size=2)
    ask(engine, HISTORY)
    for _ in range(5):
        engine.self_test()
    assert ask(engine, HISTORY).num_reused == len(HISTORY) - 2


def test_hits_and_what_was_asked_for_are_counted_once_a_request() -> None:
    registry = CollectorRegistry()
    engine, model = stub_engine(observer=Metrics(registry).of_engine())
    for _ in range(3):
        ask(engine, HISTORY)

    def counted(name: str) -> float | None:
        return registry.get_sample_value(f"phi_serve_{name}_total")

    assert counted("prefix_cache_query_tokens") == 3 * len(HISTORY)
    assert counted("prefix_cache_hit_tokens") == 2 * (len(HISTORY) - 2)
    assert counted("prompt_tokens") == len(HISTORY) + 2 * 2


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, list[int], int, str, int | None]]:
    """Prompts of a few beginnings in common: step of arrival, prompt, tokens, owner, and after how
    many steps it is cancelled."""
    stems = draw(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=12), min_size=1))
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        prompt = [
            token for stem in draw(st.lists(st.sampled_from(stems), max_size=3)) for token in stem
        ]
        tail = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
        cancelled = draw(st.one_of(st.none(), st.none(), st.integers(0, 9)))
        owner = draw(st.sampled_from(["ann", "bob"]))
        arrival = draw(st.integers(0, 40))
        requests.append((arrival, [*prompt, *tail], draw(st.integers(1, 9)), owner, cancelled))
    return requests


@settings(max_examples=150, deadline=None)
@given(
    workloads(),
    st.sampled_from([False, True]),
    st.sampled_from([ONE_ROW, LIMITS.num_bytes(3, 32), 10**6]),
    st.lists(st.sampled_from([ONE_ROW, LIMITS.num_bytes(2, 64), 10**6]), max_size=4),
)
def test_no_arrival_end_or_budget_changes_an_answer(
    requests: list[tuple[int, list[int], int, str, int | None]],
    is_lazy: bool,
    budget: int,
    budgets: list[int],
) -> None:
    """Of a shared cache of any size: equal to what each would be alone."""
    limits: KVLimits = replace(LIMITS, is_lazy=is_lazy)
    arena = Arena(limits, budget)
    engine, model = stub_engine(limits.max_rows, limits.max_len, 8, arena=arena, min_shared=3)
    submitted: list[tuple[Sequence, int | None]] = []
    for step in range(60):
        if step % 15 == 14 and budgets:
            arena.budget = budgets[step // 15 % len(budgets)]
        for arrival, prompt, num_tokens, owner, cancelled in requests:
            if arrival == step:
                sequence = greedy(str(len(submitted)), prompt, num_tokens)
                sequence.owner = owner
                engine.submit(sequence)
                submitted.append((sequence, None if cancelled is None else step + cancelled))
        for sequence, at in submitted:
            if at == step and not sequence.is_finished:
                sequence.ended_by = FinishReason.ABORT
                engine.end(sequence)
        engine.step()
    run(engine)
    for sequence, _ in submitted:
        expected = stub_answer(sequence.prompt_ids, sequence.params.max_tokens)
        assert sequence.output_ids == expected[: len(sequence.output_ids)]
        is_cancelled = sequence.finish_reason is FinishReason.ABORT
        assert is_cancelled or len(sequence.output_ids) == sequence.params.max_tokens
