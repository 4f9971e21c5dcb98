"""How much of a prompt a step reads: on simulated machines, which are noisy as real ones are."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
import pytest

from app.prefill_budget import PrefillBudget
from app.sequence import PrefillChunk, SamplingParams, Sequence, StepPlan

from .engines import greedy, run, stub_engine

STALL = 1.0
MAX_CHUNK = 192


@dataclass(frozen=True)
class Machine:
    """Milliseconds: of a decode run, per row and per thousand tokens in front of them; of a chunk,
    per thousand tokens in front, per token, and per token and thousand in front."""

    decode: float
    row: float
    context: float
    chunk: float
    position: float
    token: float
    attention: float

    def decode_ms(self, rows: list[Sequence]) -> float:
        looked_at = sum(row.num_cached for row in rows) / 1000
        return self.decode + self.row * len(rows) + self.context * looked_at if rows else 0.0

    def chunk_ms(self, start: int, num_tokens: int) -> float:
        middle = (start + num_tokens / 2) / 1000
        per_token = self.token + self.attention * middle
        return self.chunk + self.position * start / 1000 + per_token * num_tokens


MACHINES = {
    "the default model, 2 cores": Machine(8, 1.0, 3.2, 9.5, 4.0, 0.35, 0.34),
    "Phi-3 Mini, 2 cores": Machine(180, 5, 30, 180, 20, 4, 1.5),
    "a GPU": Machine(14, 0.1, 0.2, 14, 0.5, 0.03, 0.005),
    "attention is everything": Machine(5, 0.5, 10, 5, 1.5, 0.1, 2.0),
}


class Simulation:
    """Rows that decode for ever, and prompts that come; `ms` and `sizes` of each step."""

    def __init__(
        self, machine: Machine, num_rows: int = 8, seed: int = 0, *, is_split: bool = True
    ) -> None:
        self.machine = machine
        self.is_split = is_split  # the prefill's time is told apart
        self.budget = PrefillBudget(MAX_CHUNK, STALL)
        self.rows = [decoding(128) for _ in range(num_rows)]
        self._random = np.random.default_rng(seed)
        self.budget.guess(self._noisy(machine.chunk_ms(0, 1)) / 1000)

    def _noisy(self, ms: float) -> float:
        """Within 20 %, and one in 300 takes four times as long."""
        random = self._random
        return float(ms * random.uniform(0.8, 1.2) * (4 if random.random() < 1 / 300 else 1))

    def decode(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step(None)

    def read(self, num_tokens: int, num_waiting: int = 0) -> list[tuple[int, float]]:
        """Of each step until the prompt is read, its tokens and how long it took, in units of the
        step that would only have decoded."""
        prompt = Sequence("long", [7] * num_tokens, SamplingParams(max_tokens=1))
        steps = []
        while (left := num_tokens - prompt.num_cached) > 0:
            size = self.budget.take(prompt.num_cached, left, len(self.rows), num_waiting)
            chunk = PrefillChunk(prompt, len(self.rows), prompt.num_cached, [7] * size)
            plain = self.machine.decode_ms(self.rows)
            ms = self._step(chunk if size else None)
            prompt.num_cached += size
            steps.append((size, ms / plain if plain else 0.0))
        return steps

    def _step(self, chunk: PrefillChunk | None) -> float:
        machine = self.machine
        decode_ms, chunk_ms = self._noisy(machine.decode_ms(self.rows)), 0.0
        if chunk is not None:
            chunk_ms = self._noisy(machine.chunk_ms(chunk.start, len(chunk.token_ids)))
        seconds = (decode_ms + chunk_ms) / 1000
        known = chunk_ms / 1000 if chunk is not None and self.is_split else None
        self.budget.stepped(StepPlan([], chunk, self.rows), seconds, known)
        for row in self.rows:
            row.num_cached += 1
        return decode_ms + chunk_ms


def decoding(num_cached: int) -> Sequence:
    sequence = greedy("open", [7])
    sequence.num_cached = num_cached
    return sequence


def settled() -> Simulation:
    """One that knows its machine, with its rows as short as at first."""
    simulation = Simulation(MACHINES["the default model, 2 cores"])
    simulation.decode(30)
    simulation.read(2000)
    simulation.rows = [decoding(128) for _ in simulation.rows]
    return simulation


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("name", MACHINES)
def test_open_streams_keep_a_third_of_their_pace_while_long_prompts_come(
    name: str, is_split: bool
) -> None:
    ratios = []
    for seed in range(4):
        simulation = Simulation(MACHINES[name], seed=seed, is_split=is_split)
        for _ in range(3):
            simulation.decode(60)
            ratios += [ratio for _, ratio in simulation.read(4000)]
    assert statistics.quantiles(ratios, n=20)[-1] < 3


@pytest.mark.parametrize("name", MACHINES)
def test_long_prompt_is_read_in_a_bounded_number_of_steps(name: str) -> None:
    """By large chunks alone at the worst."""
    for num_rows in (2, 8):
        simulation = Simulation(MACHINES[name], num_rows=num_rows)
        assert len(simulation.read(4000)) <= -(-4000 // MAX_CHUNK) * 45


def test_far_behind_large_chunks_with_pauses_take_the_place_of_small_ones() -> None:
    """Where a small one takes as long as several steps. Else most steps read, a little each."""
    simulation = Simulation(Machine(14, 0.1, 0.2, 14, 30, 0.03, 0.005))
    simulation.decode(60)
    sizes = [size for size, _ in simulation.read(4000)][-200:-1]
    assert sizes.count(0) > 0.9 * len(sizes)
    simulation = Simulation(Machine(14, 0.5, 0.2, 4, 0.5, 0.1, 0.005))
    simulation.decode(60)
    sizes = [size for size, _ in simulation.read(8000)]
    assert sizes.count(0) < len(sizes) / 10


def test_short_prompt_that_comes_alone_is_read_at_once() -> None:
    simulation = settled()
    simulation.decode(90)
    assert [size for size, _ in simulation.read(2 * MAX_CHUNK)] == [MAX_CHUNK, MAX_CHUNK]


def test_long_steps_are_one_of_twenty_at_most_in_the_long_run() -> None:
    simulation = settled()
    sizes = [size for size, _ in simulation.read(9000)]
    assert sizes.count(MAX_CHUNK) <= 3 + len(sizes) / 20


def test_what_a_chunk_takes_is_found_out_whatever_was_guessed() -> None:
    """The self-test's step took ten times as long as others, or a tenth. A learner that kept to its
    guess would read a large chunk in every 45th step: 470 steps."""
    nums = []
    for factor in (0.1, 1, 10):
        simulation = Simulation(MACHINES["a GPU"])
        simulation.budget = PrefillBudget(MAX_CHUNK, STALL)
        simulation.budget.guess(0.01 * factor)
        simulation.read(4000)
        simulation.rows = [decoding(128) for _ in simulation.rows]
        nums.append(len(simulation.read(2000)))
    assert max(nums) < 4 * min(nums)


@pytest.mark.parametrize("num_left", [1, 191, 192, 193, 4000])
def test_as_much_as_may_be_is_read_while_nothing_decodes(num_left: int) -> None:
    assert settled().budget.take(0, num_left, 0) == min(num_left, MAX_CHUNK)


@pytest.mark.parametrize("max_chunk", [1, 3, 4, 9, 64, 192])
def test_no_chunk_is_larger_than_allowed_and_each_reads_on(max_chunk: int) -> None:
    for stall in (0.0, 0.001, 1.2, 1000.0):
        budget = PrefillBudget(max_chunk, stall)
        budget.guess(0.01)
        for num_left in (1, 5, 300):
            assert 1 <= budget.take(0, num_left, 1) <= min(max_chunk, num_left)


def test_without_a_limit_chunks_are_always_the_largest() -> None:
    unlimited = PrefillBudget(MAX_CHUNK)
    unlimited.guess(0.01)
    assert unlimited.take(3800, 4000, 8) == MAX_CHUNK


def spent() -> Simulation:
    """One that has just had its long steps."""
    simulation = settled()
    simulation.read(6 * MAX_CHUNK)
    simulation.rows = [decoding(128) for _ in simulation.rows]
    return simulation


def test_more_may_be_added_while_more_prompts_wait_than_streams_are_open() -> None:
    nums = [len(spent().read(2000, num_waiting)) for num_waiting in (0, 8, 32)]
    assert nums[0] == nums[1]
    assert nums[2] <= nums[0] / 2


def test_short_prompt_may_stall_streams_twice_as_much_as_a_long_one() -> None:
    simulation = spent()
    simulation.decode(1)  # sizes grow slowly behind a chunk
    take = simulation.budget.take
    assert take(0, 512, 8) >= 1.6 * take(0, 513, 8) > 0


def test_short_rest_is_read_at_once() -> None:
    take = spent().budget.take
    size = next(size for size in range(8, MAX_CHUNK, 8) if take(0, size + 8, 8) < size + 8)
    assert take(0, size + 7, 8) == size + 7


def test_one_chunk_that_took_far_too_long_does_not_change_the_next_much() -> None:
    simulation = spent()
    before = simulation.budget.take(0, 4000, 8)
    assert before
    chunk = PrefillChunk(greedy("late", [7] * 900), 8, 0, [7] * before)
    simulation.budget.stepped(StepPlan([], chunk, simulation.rows), 9.0, 8.9)
    assert simulation.budget.take(0, 4000, 8) >= 0.6 * before


class StubClock:
    """Moved by the model's steps, as the default model would."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_engine_reads_a_long_prompt_in_chunks_that_its_streams_can_bear() -> None:
    machine = MACHINES["the default model, 2 cores"]
    clock = StubClock()
    engine, model = stub_engine(9, 4096, MAX_CHUNK, prefill_stall=STALL)
    engine._clock = clock
    added: list[float] = []

    def pass_time(plan: StepPlan, _: object) -> None:
        plain, chunk = machine.decode_ms(plan.decode), plan.prefill
        beyond = machine.chunk_ms(chunk.start, len(chunk.token_ids)) if chunk else 0.0
        clock.now += (plain + beyond) / 1000
        if plan.decode and chunk and chunk.sequence.request_id == "long":
            added.append(beyond / plain)

    model.change = pass_time
    engine.self_test()
    for i in range(8):
        engine.submit(greedy(f"open {i}", [7] * 64, 1500))
    for _ in range(40):
        engine.step()
    engine.submit(greedy("long", [8] * 3000, 1))
    run(engine)
    assert sum(ratio > 1.5 * STALL for ratio in added) <= 3 + len(model.plans) / 20


def test_steps_that_fail_teach_nothing() -> None:
    engine, model = stub_engine(4, 512, 64, prefill_stall=STALL)
    heard: list[StepPlan] = []
    engine._scheduler.prefill_budget.stepped = lambda plan, *_: heard.append(plan)  # type: ignore[method-assign]

    def fail(*_: object) -> None:
        raise ValueError("broken")

    model.change = fail
    engine.submit(greedy("one", [7], 2))
    run(engine)
    assert len(model.plans) == 1
    assert heard == []


def test_self_test_gives_a_first_guess() -> None:
    """So that the first chunk beside a stream is no leap in the dark."""
    engine, _ = stub_engine(4, 512, 192, prefill_stall=STALL)
    budget = engine._scheduler.prefill_budget
    budget._num_long = 0
    assert budget.take(0, 500, 1) == 192
    engine.self_test()
    assert budget.take(0, 500, 1) < 192


def test_clock_that_stands_still_divides_nothing_by_zero() -> None:
    budget = PrefillBudget(MAX_CHUNK, STALL)
    rows = [decoding(9)]
    prompt = Sequence("long", [7] * 4000, SamplingParams(max_tokens=1))
    for start in range(0, 1600, MAX_CHUNK):
        chunk = PrefillChunk(prompt, 1, start, [7] * MAX_CHUNK)
        budget.stepped(StepPlan([], chunk, rows), 0.0, 0.0)
        assert 0 <= budget.take(start + MAX_CHUNK, 2000, 1) <= MAX_CHUNK
