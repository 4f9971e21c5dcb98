"""When an answer counts as going round in circles, and that it ends there and not before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.repetition import MAX_NGRAM, extend_runs, num_repeats
from app.sequence import FinishReason, SamplingParams, Sequence

from .engines import run, scripted_engine

A, B, C = 5, 6, 7
REFRAIN = [20, 21, 22, 23, 24]
# Two verses, each with the refrain twice behind it.
POEM = [*range(30, 42), *REFRAIN, *REFRAIN, *range(50, 62), *REFRAIN, *REFRAIN, 99]


def repeats_at_end(ids: list[int]) -> int:
    runs: list[int] = []
    for end in range(1, len(ids) + 1):
        runs = extend_runs(runs, ids[:end])
    return num_repeats(runs)


def counted_by_hand(ids: list[int]) -> int:
    """The same, from its definition."""
    best = 1
    for n in range(1, MAX_NGRAM + 1):
        times = 1
        while ids[-n * (times + 1) :] == ids[-n:] * (times + 1):
            times += 1
        best = max(best, times)
    return best


def answered(
    script: list[int], guard: int, max_tokens: int = 3000, min_tokens: int = 0
) -> Sequence:
    engine = scripted_engine(script)
    params = SamplingParams(max_tokens, min_tokens, ignore_eos=True, repetition_guard=guard)
    sequence = Sequence("guarded", [1], params)
    engine.submit(sequence)
    run(engine)
    return sequence


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.integers(0, 2), min_size=1, max_size=MAX_NGRAM),
    st.integers(1, 6),
)
def test_repeats_are_those_of_the_definition(
    front: list[int], ngram: list[int], times: int
) -> None:
    ids = [*front, *ngram * times]
    assert repeats_at_end(ids) == counted_by_hand(ids) >= times


@pytest.mark.parametrize(
    ("ids", "times"),
    [
        ([A], 1),
        ([A, B], 1),
        ([A, A], 2),
        ([A, B, A], 1),
        ([A, B, A, B], 2),
        ([C, A, A, A], 3),
        ([A, A, A, B], 1),
        ([A, B, A, B, A], 2),  # b a, b a
        (list(range(MAX_NGRAM)) * 3, 3),
        (list(range(MAX_NGRAM + 1)) * 3, 1),  # longer than what is looked for
    ],
)
def test_repeats_are_counted_at_the_end(ids: list[int], times: int) -> None:
    assert repeats_at_end(ids) == times


@pytest.mark.parametrize("guard", [2, 3, 10, 200])
def test_loop_ends_at_the_set_number_of_repeats(guard: int) -> None:
    sequence = answered([A, B, C], guard)
    assert sequence.finish_reason is FinishReason.REPETITION
    assert sequence.output_ids == [A, B, C] * guard


def test_loop_runs_on_until_min_tokens() -> None:
    sequence = answered([A, B, C], guard=3, min_tokens=20)
    assert sequence.finish_reason is FinishReason.REPETITION
    assert len(sequence.output_ids) == 20


def test_loop_runs_on_without_the_guard() -> None:
    sequence = answered([A, B, C], guard=0, max_tokens=600)
    assert (len(sequence.output_ids), sequence.finish_reason) == (600, FinishReason.LENGTH)


def test_loop_that_begins_late_ends_too() -> None:
    sequence = answered([*POEM, *[A, B, C] * 200], guard=20)
    assert sequence.output_ids == [*POEM, *[A, B, C] * 20]


def test_refrain_sung_twice_does_not_trip() -> None:
    sequence = answered(POEM, guard=3, max_tokens=len(POEM))
    assert (sequence.output_ids, sequence.finish_reason) == (POEM, FinishReason.LENGTH)


def test_repeats_of_the_prompt_do_not_count() -> None:
    engine = scripted_engine([A, A, B])
    sequence = Sequence("guarded", [A] * 50, SamplingParams(3, repetition_guard=4))
    engine.submit(sequence)
    run(engine)
    assert sequence.finish_reason is FinishReason.LENGTH


def test_guard_of_one_request_leaves_its_neighbours_alone() -> None:
    engine = scripted_engine([A, B])
    guarded = Sequence("guarded", [1], SamplingParams(50, repetition_guard=5))
    free = Sequence("free", [1], SamplingParams(50))
    for sequence in (guarded, free):
        engine.submit(sequence)
    run(engine)
    assert (len(guarded.output_ids), len(free.output_ids)) == (10, 50)
    assert free.finish_reason is FinishReason.LENGTH
