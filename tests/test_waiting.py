"""Whose turn it is among those that wait: fair by tokens, then by priority, then by arrival."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from app.sequence import FinishReason, SamplingParams, Sequence
from app.waiting import WaitingQueue

from .engines import run, stub_engine


def asked(
    name: str, owner: str = "", priority: int = 0, num_prompt: int = 1, max_tokens: int = 1
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, [7] * num_prompt, params, owner=owner, priority=priority)


def queue_of(*sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue()
    for sequence in sequences:
        queue.add(sequence)
    return queue


def take_all(queue: WaitingQueue) -> list[str]:
    """Each is served its prompt and its answer before the next is taken."""
    names = []
    while queue:
        sequence = queue.take()
        queue.charge(sequence.owner, len(sequence.prompt_ids) + sequence.params.max_tokens)
        names.append(sequence.request_id)
    return names


def test_who_came_first_is_first_where_all_else_is_equal() -> None:
    assert take_all(queue_of(*(asked(name) for name in "abcd"))) == list("abcd")


def test_lower_priority_is_first_and_equals_keep_their_order() -> None:
    queue = queue_of(asked("a"), asked("b", priority=5), asked("c", priority=-1), asked("d"))
    assert take_all(queue) == ["c", "a", "d", "b"]


def test_owners_take_turns() -> None:
    flood = [asked(f"a{i}", "a") for i in range(4)]
    queue = queue_of(*flood, asked("b0", "b"), asked("b1", "b"))
    assert take_all(queue) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_turns_are_by_tokens_and_not_by_requests() -> None:
    large = [asked(f"a{i}", "a", num_prompt=20, max_tokens=10) for i in range(3)]
    small = [asked(f"b{i}", "b", num_prompt=4, max_tokens=6) for i in range(9)]
    names = take_all(queue_of(*large, *small))
    assert Counter(name[0] for name in names[:8]) == {"a": 2, "b": 6}


def test_no_priority_lets_an_owner_pass_another() -> None:
    urgent = [asked(f"a{i}", "a", priority=-1000) for i in range(50)]
    names = take_all(queue_of(*urgent, asked("b", "b", priority=1000)))
    assert names.index("b") == 1


def test_owner_that_asked_for_nothing_has_saved_up_nothing() -> None:
    queue = queue_of(*(asked(f"a{i}", "a") for i in range(200)))
    for _ in range(100):
        queue.charge(queue.take().owner, 2)
    for i in range(100):
        queue.add(asked(f"b{i}", "b"))
    assert Counter(name[0] for name in take_all(queue)[:20]) == {"a": 10, "b": 10}


def test_owner_that_comes_back_has_not_lost_its_debt() -> None:
    queue = queue_of(asked("a0", "a"), asked("b0", "b"), asked("b1", "b"))
    assert queue.take().request_id == "a0"
    queue.charge("a", 1000)
    queue.add(asked("a1", "a"))
    assert take_all(queue) == ["b0", "b1", "a1"]


def test_choices_of_a_request_stay_together() -> None:
    first = [asked(f"first {choice}") for choice in range(3)]
    second = [asked(f"second {choice}") for choice in range(3)]
    assert take_all(queue_of(*first, *second)) == [s.request_id for s in [*first, *second]]


def test_what_is_removed_is_never_taken() -> None:
    sequences = [asked(name, owner) for name, owner in zip("abcd", "xxyy", strict=True)]
    queue = queue_of(*sequences)
    assert [queue.remove(sequence) for sequence in sequences[1:]] == [True] * 3
    assert [queue.remove(sequence) for sequence in sequences[1:]] == [False] * 3
    assert (len(queue), take_all(queue)) == (1, ["a"])


class Counted(Sequence):
    """Counts how often one is looked at."""

    num_looks = 0

    def __getattribute__(self, name: str) -> Any:
        Counted.num_looks += 1
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        Counted.num_looks += 1
        return self is other

    __hash__ = object.__hash__


def test_turn_in_a_long_queue_takes_as_few_looks_as_in_a_short_one() -> None:
    params = SamplingParams(max_tokens=1)
    sequences: list[Sequence] = [Counted(str(i), [7], params, priority=i % 5) for i in range(5000)]
    queue = queue_of(*sequences)
    Counted.num_looks = 0
    for sequence in sequences[2000:2500]:
        assert queue.remove(sequence)
    for _ in range(500):
        queue.take()
    assert Counted.num_looks < 10 * 1000


# --- in the engine --------------------------------------------------------------------------------


def tokens_by_owner(sequences: list[Sequence]) -> Counter[str]:
    """Read and written so far."""
    served: Counter[str] = Counter()
    for sequence in sequences:
        if sequence.num_cached:
            served[sequence.owner] += len(sequence.prompt_ids) + len(sequence.output_ids)
    return served


@pytest.mark.parametrize("num_owners", [2, 3])
def test_flood_of_one_owner_leaves_the_others_their_equal_share_of_tokens(num_owners: int) -> None:
    engine, _ = stub_engine(max_batch_size=4)
    flood = [asked("flood", "flood", num_prompt=8, max_tokens=20) for _ in range(300)]
    others = [
        asked(owner, owner, num_prompt=3, max_tokens=5)
        for owner in "xy"[: num_owners - 1]
        for _ in range(100)
    ]
    for sequence in flood:
        engine.submit(sequence)
    for _ in range(200):
        engine.step()
    before = tokens_by_owner(flood)["flood"]
    for sequence in others:
        engine.submit(sequence)
    for _ in range(200):
        engine.step()
    served = tokens_by_owner([*flood, *others])
    served["flood"] -= before
    assert any(sequence.num_cached == 0 for sequence in others), "they still wait"
    assert max(served.values()) - min(served.values()) < 4 * 28  # the rows' worth of answers
    assert min(served.values()) > 200


def test_prompts_count_as_answers_do() -> None:
    engine, _ = stub_engine(max_batch_size=1, prefill_chunk=64)
    long = [asked(f"a{i}", "a", num_prompt=60) for i in range(30)]
    short = [asked(f"b{i}", "b") for i in range(400)]
    for sequence in [*long, *short]:
        engine.submit(sequence)
    for _ in range(200):
        engine.step()
    served = tokens_by_owner([*long, *short])
    assert min(served.values()) > 200
    assert max(served.values()) - min(served.values()) <= 61


def test_sequence_that_ends_in_a_full_queue_is_told_in_the_next_step_and_never_read() -> None:
    engine, model = stub_engine(max_batch_size=1)
    running, *waiting = [asked(str(i), max_tokens=30) for i in range(1000)]
    for sequence in [running, *waiting]:
        engine.submit(sequence)
    engine.step()
    gone = waiting[500]
    gone.ended_by = FinishReason.TIMEOUT
    engine.end(gone)
    [told] = [advance for advance in engine.step() if advance.sequence is gone]
    assert (told.token_id, told.finish_reason) == (None, FinishReason.TIMEOUT)
    assert engine._scheduler.num_waiting == 998
    for sequence in waiting:
        sequence.ended_by = FinishReason.ABORT
        engine.end(sequence)
    told_now = [a.sequence for a in engine.step() if a.finish_reason is FinishReason.ABORT]
    assert set(told_now) == set(waiting) - {gone}
    run(engine)
    assert {plan.prefill.sequence for plan in model.plans if plan.prefill} == {running}


def test_engine_whose_only_sequence_ends_in_the_queue_still_tells() -> None:
    engine, _ = stub_engine()
    gone = asked("gone")
    engine.submit(gone)
    gone.ended_by = FinishReason.ABORT
    engine.end(gone)
    assert [advance.sequence for advance in run(engine)] == [gone]
