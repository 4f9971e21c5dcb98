"""What waits, how long that takes, and when there is no room: on the stub engine, with a clock that
its steps move, as a model would."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import pytest

from app.arena import Arena, KVLimits
from app.backlog import Backlog, Place, _Running
from app.errors import Overloaded
from app.pace import Pace
from app.scheduler import Scheduler
from app.sequence import FinishReason, SamplingParams, Sequence, StepPlan
from app.work import Work

from .engines import stub_engine

CHUNK = 8


class Simulation:
    """An engine whose steps take `step_seconds`, and `token_seconds` per prompt token."""

    def __init__(
        self, step_seconds: float = 0.02, token_seconds: float = 0.0, num_rows: int = 4
    ) -> None:
        self.now = 0.0
        self.backlog = Backlog(10**6, 10**9, CHUNK, clock=lambda: self.now)
        self.engine, self.model = stub_engine(
            num_rows, 4096, CHUNK, min_shared=None
        )  # each prompt is read whole
        self.engine._clock = lambda: self.now
        self.engine.backlog = self.backlog
        self.open: list[Sequence] = []

        def change(plan: StepPlan, logits: Any) -> None:
            num_tokens = len(plan.prefill.token_ids) if plan.prefill else 0
            self.now += step_seconds + token_seconds * num_tokens

        self.model.change = change
        self.engine.self_test()

    def submit(self, *sequences: Sequence) -> None:
        self.backlog.add(sequences)
        self.open += sequences
        for sequence in sequences:
            self.engine.submit(sequence)

    def run(self, *until_finished: Sequence) -> None:
        while not all(sequence.is_finished for sequence in until_finished or self.open):
            self.engine.step()

    def wait_of(self, sequence: Sequence) -> float:
        """How long it waits that comes now."""
        came_at = self.now
        self.submit(sequence)
        while sequence.admitted_at is None:
            self.engine.step()
        return sequence.admitted_at - came_at


def asked(
    num_prompt: int = 3, max_tokens: int = 10, owner: str = "", priority: int = 0
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence("x", [7] * num_prompt, params, owner=owner, priority=priority)


@dataclass(frozen=True)
class Load:
    num_waiting: int
    num_prompt: int
    max_tokens: int
    token_seconds: float = 0.0


LOADS = {
    "one row's worth": Load(4, 3, 20),
    "many short": Load(200, 3, 5),
    "long answers": Load(40, 3, 80),
    "long prompts": Load(40, 100, 3, 0.001),
    "both": Load(60, 60, 40, 0.002),
    "one token each": Load(100, 8, 1, 0.01),
}


@pytest.mark.parametrize("load", LOADS)
def test_estimate_is_within_a_quarter_of_the_true_wait(load: str) -> None:
    shape = LOADS[load]
    simulation = Simulation(token_seconds=shape.token_seconds)
    wants = (shape.num_prompt, shape.max_tokens)
    simulation.submit(*(asked(*wants) for _ in range(12)))  # it gets to know its pace
    simulation.run()
    simulation.submit(*(asked(*wants) for _ in range(shape.num_waiting)))
    simulation.engine.step()
    estimate = simulation.backlog.next_place("").seconds
    true = simulation.wait_of(asked())
    assert 0.75 * true < estimate < 1.25 * true


def test_estimate_of_a_cold_start_is_of_the_right_size_once_answers_are_as_long_as_asked_for() -> (
    None
):
    """All that is known is the self-test's step."""
    simulation = Simulation()
    simulation.submit(*(asked(3, 10) for _ in range(100)))
    estimate = simulation.backlog.next_place("").seconds
    true = simulation.wait_of(asked())
    assert true / 2 < estimate < true * 2


def test_answers_shorter_than_asked_for_are_expected_so_once_some_have_ended() -> None:
    simulation = Simulation()

    def end_early() -> list[Sequence]:
        return [asked(3, 1000) for _ in range(40)]

    for sequence in end_early():
        simulation.submit(sequence)
        while len(sequence.output_ids) < 5:
            simulation.engine.step()
        sequence.ended_by = FinishReason.STOP
        simulation.run(sequence)
    assert simulation.backlog.pace.answer_tokens == pytest.approx(5, abs=1)
    simulation.submit(*end_early())
    # 40 answers of 5 tokens each, on four rows, a step being 20 ms.
    assert 0.5 < simulation.backlog.next_place("").seconds < 2


def test_newcomer_waits_for_the_first_row_that_ends_and_not_for_the_last() -> None:
    simulation = Simulation()
    simulation.submit(asked(3, 50))
    simulation.run()
    simulation.submit(*(asked(3, 50) for _ in range(3)), asked(3, 5))
    for _ in range(4):
        simulation.engine.step()
    assert simulation.backlog.next_place("").seconds == pytest.approx(4 * 0.02, abs=0.02)


def test_no_wait_is_told_while_rows_are_free() -> None:
    simulation = Simulation()
    simulation.submit(asked(3, 50))
    simulation.engine.step()
    assert simulation.backlog.next_place("").seconds < 0.03
    assert simulation.backlog.next_place("").position == 1


def test_flood_of_another_owner_is_not_in_front_of_a_newcomer() -> None:
    simulation = Simulation()
    simulation.submit(*(asked(3, 20) for _ in range(8)))
    simulation.run()
    simulation.submit(*(asked(3, 20, owner="flood") for _ in range(400)))
    for _ in range(10):
        simulation.engine.step()
    alone = simulation.backlog.next_place("newcomer")
    behind = simulation.backlog.next_place("flood")
    assert (alone.position, behind.position) == (2, 397)
    true = simulation.wait_of(asked(owner="newcomer"))
    assert true / 2 < alone.seconds < true * 2
    assert behind.seconds > 50 * true / 4


def test_places_are_in_the_order_in_which_the_sequences_are_taken_up() -> None:
    simulation = Simulation(num_rows=1)
    waiting = [
        asked(owner=owner, priority=priority)
        for owner, priority in [("a", 0), ("a", 0), ("a", -1), ("b", 7), ("b", 7), ("a", 3)]
    ]
    simulation.submit(asked(owner="c", max_tokens=4), *waiting)
    simulation.engine.step()
    places = [simulation.backlog.place(s, simulation.open) for s in waiting]
    positions = [place.position for place in places if place]
    assert {place.length for place in places if place} == {6}
    simulation.run()
    order = sorted(waiting, key=lambda s: s.admitted_at or 0.0)
    assert [positions[waiting.index(s)] for s in order] == [1, 2, 3, 4, 5, 6]
    seconds = [place.seconds for place in places if place]
    assert [seconds[waiting.index(s)] for s in order] == sorted(seconds)


def test_sequence_that_runs_or_has_ended_has_no_place() -> None:
    simulation = Simulation(num_rows=1)
    running, gone, waiting = asked(), asked(), asked()
    simulation.submit(running, gone, waiting)
    simulation.engine.step()
    gone.ended_by = FinishReason.ABORT
    places = [simulation.backlog.place(s, simulation.open) for s in (running, gone, waiting)]
    assert [place and place.position for place in places] == [None, None, 1]


def test_sequence_that_is_taken_up_while_its_place_is_looked_for_has_none() -> None:
    simulation = Simulation(num_rows=1)
    running, waiting = asked(max_tokens=1), asked()
    simulation.submit(running, waiting)

    def taken_up() -> Iterator[Sequence]:
        while waiting.admitted_at is None:  # by the engine thread
            simulation.engine.step()
        yield waiting

    assert simulation.backlog.place(waiting, taken_up()) is None


def test_sequence_has_no_place_once_a_stop_has_ended_all() -> None:
    waiting = asked()
    backlog = Backlog()
    backlog.add([waiting])
    assert backlog.place(waiting, []) is None


def test_place_is_never_that_of_a_sequence_that_was_there_before() -> None:
    """At the same address, within the second in which places are not looked up again."""
    backlog = Backlog(clock=lambda: 0.0)
    others = [asked(), asked()]
    gone = asked()
    assert backlog.place(gone, [gone, *others]) == Place(1, 3, 0.0)
    address = id(gone)
    del gone
    newcomers = [asked()]
    while id(newcomers[-1]) != address and len(newcomers) < 1000:
        newcomers.append(asked())
    place = backlog.place(newcomers[-1], [*others, newcomers[-1]])
    assert place is not None and place.position == 3


def test_place_that_was_told_keeps_no_sequence_alive() -> None:
    backlog, sequence = Backlog(), asked()
    num = sys.getrefcount(sequence)
    assert backlog.place(sequence, [sequence]) is not None
    assert sys.getrefcount(sequence) == num


def test_counts_are_zero_again_however_sequences_left() -> None:
    simulation = Simulation(num_rows=1)
    sequences = [asked(max_tokens=3 + i % 30, owner="ab"[i % 2]) for i in range(20)]
    simulation.submit(*sequences)
    simulation.engine.step()
    assert (simulation.backlog.num_sequences, simulation.backlog.num_prompt_tokens) == (19, 57)
    for sequence in sequences[5:10]:
        sequence.ended_by = FinishReason.TIMEOUT
        simulation.engine.end(sequence)
    simulation.engine.step()
    assert simulation.backlog.num_sequences == 14
    sequences[10].ended_by = FinishReason.ABORT  # noticed when its turn comes
    simulation.run()
    assert (simulation.backlog.num_sequences, simulation.backlog.num_prompt_tokens) == (0, 0)
    assert simulation.backlog.next_place("a").seconds == 0


def test_self_tests_count_for_nobody() -> None:
    simulation = Simulation()
    simulation.submit(asked())
    simulation.run()
    simulation.engine.self_test()
    assert simulation.backlog.num_sequences == 0
    assert simulation.backlog.pace.answer_tokens == 10


def test_pace_is_that_of_requests_and_not_of_self_tests() -> None:
    simulation = Simulation(token_seconds=0.001)
    simulation.submit(*(asked(20) for _ in range(10)))
    simulation.run()
    pace = simulation.backlog.pace
    measured = (pace.step_seconds, pace.token_seconds, pace.answer_tokens)
    model: Any = simulation.engine._model

    def idle(plan: StepPlan, logits: Any) -> None:
        simulation.now += 5

    model.change = idle
    for _ in range(3):
        simulation.engine.self_test()
    assert (pace.step_seconds, pace.token_seconds, pace.answer_tokens) == measured


def known_pace(step_seconds: float, token_seconds: float) -> Backlog:
    backlog = Backlog()
    backlog.pace.step_seconds, backlog.pace.token_seconds = step_seconds, token_seconds
    return backlog


@pytest.mark.parametrize(
    ("ahead", "running", "seconds"),
    [
        # 55 steps of rows, less half an answer of 10 of the row that still runs then, on two rows;
        # and 40 tokens of prompts.
        (Work(4, 40, 5, 40), _Running(2, Work(2, 0, 0, 10), 3), 25 * 0.1 + 40 * 0.01),
        (Work(4, 40, 5, 40), _Running(1, Work(1, 0, 0, 10), 3), 55 * 0.1 + 40 * 0.01),
        (Work(), _Running(2, Work(2, 0, 0, 10), 3), 3 * 0.1),  # until the first of them ends
        (Work(), _Running(2, Work(1, 6, 2, 10), 3), 2 * 0.1 + 6 * 0.01),  # a row is free
        (Work(1, 800, 99, 1), _Running(4, Work(4, 0, 0, 4), 1), 99 * 0.1 + 800 * 0.01),
    ],
)
def test_seconds_of_known_work(ahead: Work, running: _Running, seconds: float) -> None:
    assert known_pace(0.1, 0.01)._seconds(ahead, running) == pytest.approx(seconds)


def test_newcomer_has_its_place_though_the_queue_was_just_listed() -> None:
    simulation = Simulation(num_rows=1)
    running, first, second = asked(), asked(), asked()
    simulation.submit(running, first)
    simulation.engine.step()
    places = [simulation.backlog.place(first, simulation.open)]
    simulation.submit(second)
    places += [simulation.backlog.place(each, simulation.open) for each in (second, first)]
    assert [place and place.position for place in places] == [1, 2, 1]


def test_those_that_have_left_the_queue_are_not_in_front() -> None:
    simulation = Simulation(num_rows=1)
    sequences = [asked(3, 5) for _ in range(101)]
    simulation.submit(*sequences)
    simulation.run(*sequences[:99])
    simulation.engine.step()
    place = simulation.backlog.next_place("")
    assert (place.position, place.length) == (2, 1)
    assert place.seconds == pytest.approx(10 * 0.02, abs=0.05)
    line = simulation.backlog._lines[""]
    assert [line.work(expected).num_answer_tokens for expected in (1, 1000)] == [1, 5]


def test_sequence_that_the_last_step_has_ended_does_not_run() -> None:
    simulation = Simulation(num_rows=1)

    def fail(plan: StepPlan, logits: Any) -> None:
        raise RuntimeError

    simulation.submit(asked(3, 50))
    for _ in range(3):
        simulation.engine.step()
    assert simulation.backlog.next_place("").seconds > 0
    simulation.model.change = fail
    simulation.run()
    assert simulation.backlog.next_place("").seconds == 0


# --- bounds ---------------------------------------------------------------------------------------


def bounded(num_waiting: int, num_prompt: int = 3, **bounds: int) -> Backlog:
    backlog = Backlog(**bounds)
    backlog.add([asked(num_prompt) for _ in range(num_waiting)])
    return backlog


@pytest.mark.parametrize(
    ("num_waiting", "more", "is_refused"),
    [(9, (1, 1), False), (10, (1, 1), True), (8, (3, 3), True), (0, (11, 11), False)],
)
def test_bound_of_sequences(num_waiting: int, more: tuple[int, int], is_refused: bool) -> None:
    assert refuses(bounded(num_waiting, max_sequences=10), more) == is_refused


@pytest.mark.parametrize(
    ("num_waiting", "more", "is_refused"),
    [(3, (1, 1), False), (3, (1, 2), True), (0, (1, 11), False), (1, (1, 11), True)],
)
def test_bound_of_prompt_tokens(num_waiting: int, more: tuple[int, int], is_refused: bool) -> None:
    """One that is larger than the bound is taken where nothing waits, or it would never be."""
    assert refuses(bounded(num_waiting, max_prompt_tokens=10), more) == is_refused


def refuses(backlog: Backlog, more: tuple[int, int]) -> bool:
    try:
        backlog.check("", *more)
    except Overloaded:
        return True
    return False


def test_key_that_floods_leaves_room_for_others_and_these_for_more() -> None:
    backlog = Backlog(max_sequences=100)

    def flood(owner: str) -> int:
        for num_taken in range(101):
            try:
                backlog.check(owner, 1, 1)
            except Overloaded as error:
                assert "API key" in error.message
                return num_taken
            backlog.add([asked(owner=owner)])
        raise AssertionError("there is no bound")

    assert [flood(owner) for owner in "abcd"] == [50, 25, 13, 6]


def test_refusal_takes_as_little_with_a_thousand_keys_and_those_that_are_gone_cost_nothing() -> (
    None
):
    backlog = Backlog(max_sequences=1000)
    waiting = [asked(3 + i % 50, owner=f"key {i}") for i in range(1000)]
    backlog.add(waiting)
    started_at = time.thread_time()
    for _ in range(300):
        with pytest.raises(Overloaded):
            backlog.check("newcomer", 1, 1)
    assert (time.thread_time() - started_at) / 300 < 0.001
    backlog.planned(StepPlan([], None, [], dequeued=waiting))
    backlog._shares_at = -10.0
    assert backlog.next_place("newcomer") == Place(1, 0, 0.0)
    assert backlog._lines == {}


@pytest.mark.parametrize("own", [0, 7, 300])
def test_place_behind_many_keys_is_what_a_look_at_each_says(own: int) -> None:
    backlog = Backlog(prefill_chunk=CHUNK)
    num = {f"key {i}": 1 + i * i % 9 for i in range(40)} | {"own": own}
    for owner, count in num.items():
        backlog.add([asked(3 + 7 * i % 30, 10 + i, owner=owner) for i in range(count)])
    works = {name: line.work(backlog.pace.answer_tokens) for name, line in backlog._lines.items()}
    total = sum(works.values(), Work())
    ahead = works.pop("own", Work())
    share = ahead.num_tokens + total.num_tokens / total.num_sequences
    ahead = sum((work.up_to(share) for work in works.values()), ahead)
    assert astuple(backlog._ahead("own")) == pytest.approx(astuple(ahead))


def test_refusal_says_what_waits_and_which_bound_that_is() -> None:
    backlog = bounded(10, max_sequences=10)
    with pytest.raises(Overloaded) as caught:
        backlog.check("", 1, 5)
    assert "10 choices with 30 prompt tokens wait" in caught.value.message
    assert "at most 10 may wait (MAX_QUEUED_REQUESTS)" in caught.value.message
    error = caught.value.body()["error"]
    assert (error["queue_position"], error["queue_length"]) == (11, 10)
    with pytest.raises(Overloaded, match=r"at most 31 tokens may wait \(MAX_QUEUED_TOKENS\)"):
        bounded(10, max_prompt_tokens=31).check("", 1, 5)


def test_refusal_takes_no_longer_for_a_long_queue() -> None:
    backlog = Backlog(max_sequences=5000)
    backlog.add([asked(3, 1 + i, f"key {i % 10}") for i in range(5000)])
    started_at = time.thread_time()
    for _ in range(100):
        assert refuses(backlog, (1, 1))
    assert (time.thread_time() - started_at) / 100 < 0.001


# --- pace -----------------------------------------------------------------------------------------


def test_pace_tells_prompts_from_steps() -> None:
    pace = Pace()
    pace.stepped(1, 0.5)  # a self-test, slow for it is the first
    for _ in range(50):
        pace.stepped(0, 0.02)
        pace.stepped(100, 0.12)
    assert pace.step_seconds == pytest.approx(0.02)
    assert pace.token_seconds == pytest.approx(0.001, rel=0.1)
    assert pace.seconds(10, 1000) == pytest.approx(1.2, rel=0.1)


def test_pace_follows_prompts_that_get_slower() -> None:
    pace = Pace()
    for beyond in (*[0.1] * 100, *[0.3] * 50):
        pace.stepped(0, 0.02)
        pace.stepped(100, 0.02 + beyond)
    assert pace.token_seconds == pytest.approx(0.003, rel=0.1)


def test_prompts_that_take_no_longer_than_a_step_take_no_time_of_their_own() -> None:
    pace = Pace()
    for _ in range(10):
        pace.stepped(0, 0.02)
        pace.stepped(5, 0.01)
    assert pace.token_seconds == 0


def test_length_of_answers_follows_them() -> None:
    pace = Pace()
    for num_tokens in (*[100] * 200, *[5] * 200):
        pace.answered(num_tokens)
    assert pace.answer_tokens == pytest.approx(5, abs=1)


def test_pace_follows_a_batch_that_fills() -> None:
    pace = Pace()
    for seconds in (*[0.01] * 100, *[0.06] * 50):
        pace.stepped(0, seconds)
    assert pace.step_seconds == pytest.approx(0.06, rel=0.1)


def test_estimate_counts_the_steps_of_chunks_as_small_as_they_are() -> None:
    """Beside open streams prompts are read by 8 tokens, though 64 would be allowed."""
    simulation = Simulation(num_rows=4)
    simulation.backlog = simulation.engine.backlog = Backlog(
        10**6, 10**9, 64, clock=lambda: simulation.now
    )
    wants = (64, 20)
    simulation.submit(*(asked(*wants) for _ in range(20)))
    simulation.run()
    assert simulation.backlog.pace.steps_per_chunk == pytest.approx(8, rel=0.25)
    simulation.submit(*(asked(*wants) for _ in range(40)))
    simulation.engine.step()
    estimate = simulation.backlog.next_place("").seconds
    true = simulation.wait_of(asked())
    assert 0.75 * true < estimate < 1.25 * true


def test_prompts_of_which_the_cache_has_most_are_no_reason_to_expect_ever_more_steps() -> None:
    """Each is read in one step, as was expected of it."""
    simulation = Simulation()
    scheduler = Scheduler(4, 4096, CHUNK, frozenset(), min_shared=4)
    simulation.engine._scheduler = scheduler
    for number in range(300):
        sequence = asked(3, 2)
        sequence.prompt_ids = [1, 2, 3, 4, 5, number, 7]
        simulation.submit(sequence)
        simulation.run(sequence)
    assert sequence.num_reused == 5
    assert simulation.backlog.pace.steps_per_chunk == pytest.approx(1)


def test_preempted_sequence_waits_about_as_long_as_its_place_tells() -> None:
    simulation = Simulation(num_rows=4)
    limits = KVLimits(4, 4096, 16, bytes_per_token=1, bytes_per_row=0)
    scheduler = simulation.engine._scheduler
    scheduler.arena = Arena(limits, 4096)
    simulation.engine._cache.rows = [[]]  # type: ignore[attr-defined]
    running = [asked(3, 40) for _ in range(4)]
    simulation.submit(*running)
    while not all(each.output_ids for each in running):
        simulation.engine.step()
    scheduler.arena.budget = 16  # a row
    simulation.engine.step()
    place = simulation.backlog.place(running[-1], simulation.open)
    assert place is not None
    assert place.position == 3
    came_at = simulation.now
    simulation.run(*running[:3])
    true = simulation.now - came_at
    assert 0.75 * true < place.seconds < 1.25 * true


def test_preempted_sequences_count_once_and_are_expected_to_run_on() -> None:
    simulation = Simulation(num_rows=4)
    limits = KVLimits(4, 4096, 16, bytes_per_token=1, bytes_per_row=0)
    scheduler = simulation.engine._scheduler
    scheduler.arena = Arena(limits, 4096)
    simulation.engine._cache.rows = [[]]  # type: ignore[attr-defined]
    running = [asked(3, 40) for _ in range(4)]
    simulation.submit(*running)
    while not all(each.output_ids for each in running):
        simulation.engine.step()
    seconds = simulation.backlog.next_place("").seconds
    scheduler.arena.budget = 48  # three rows, for a while
    simulation.engine.step()
    [preempted] = [each for each in running if each.num_preemptions]
    backlog = simulation.backlog
    assert (backlog.num_sequences, backlog.num_prompt_tokens) == (0, 0)
    assert backlog.place(preempted, simulation.open) is not None
    assert backlog.next_place("").seconds > 0.8 * seconds
    simulation.submit(asked(5, 40))
    assert (backlog.num_sequences, backlog.num_prompt_tokens) == (1, 5)
    simulation.run()
    assert (backlog.num_sequences, backlog.num_prompt_tokens) == (0, 0)
    assert backlog._preempted == []
