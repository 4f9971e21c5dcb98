"""The KV cache's budget over series of readings as machines give them (FR30).

A small arena stands for the real one: rows of growing length claim memory before they touch it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from app.memory import MemoryBudget

GIB = 1 << 30
ROW = GIB // 4
MAX_ROWS = 32


class NVMLError(Exception):
    """As pynvml's: no relation to OSError."""


@dataclass
class Machine:
    """Memory in bytes, and a clock that only the test moves."""

    size: int = 8 * GIB
    others: int = 0
    held: int = 0  # by the cache under test
    now: float = 0.0
    num_reads: int = 0
    distort: Callable[[int], int] = lambda free: free

    def read(self) -> int:
        self.num_reads += 1
        return self.distort(max(0, self.size - self.others - self.held))

    def clock(self) -> float:
        return self.now


def budget_on(machine: Machine, share: float = 0.8, reserve: int = 0) -> MemoryBudget:
    return MemoryBudget(machine.read, share, reserve, machine.clock)


def at(budget: MemoryBudget, machine: Machine, seconds: float) -> int:
    """Every half second until then; the last answer."""
    value = budget.update(machine.held)
    while machine.now < seconds:
        machine.now += 0.5
        value = budget.update(machine.held)
    return value


@dataclass
class Arena:
    """Claims rows while the budget has room for them, touches them in the steps that follow, and
    gives back what is beyond the budget; one row it always keeps."""

    machine: Machine
    budget: MemoryBudget
    claimed: int = 0
    limits: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)

    def step(self) -> None:
        machine = self.machine
        machine.held = min(self.claimed, machine.held + ROW // 2)
        total = self.budget.update(machine.held)
        room = max(0, total - self.claimed)
        self.claimed += min(ROW, room // ROW * ROW)
        while self.claimed > max(total, ROW):
            self.claimed -= ROW
        self.claimed = max(self.claimed, ROW)
        machine.held = min(machine.held, self.claimed)
        self.totals.append(total)
        self.limits.append(max(1, min(MAX_ROWS, total // ROW)))


def simulate(machine: Machine, seconds: float, change: Callable[[float], None]) -> Arena:
    arena = Arena(machine, budget_on(machine))
    while machine.now < seconds:
        change(machine.now)
        arena.step()
        machine.now += 0.05
    return arena


def turns(values: list[int]) -> int:
    """How often a series changes its direction."""
    steps = [b - a for a, b in pairwise(values) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


def undisturbed(now: float) -> None:
    pass


def test_budget_is_the_share_of_what_is_free_less_the_reserve() -> None:
    machine = Machine(size=1000)
    assert budget_on(machine, 0.5, reserve=100).update(0) == 400


def test_own_memory_counts_as_free() -> None:
    machine = Machine(size=1000, held=900)
    assert budget_on(machine).update(900) == 800


def test_growing_cache_does_not_lower_its_own_budget() -> None:
    machine = Machine()
    arena = simulate(machine, 20, undisturbed)
    assert len(set(arena.limits)) == 1
    assert arena.claimed == machine.held == arena.limits[0] * ROW


def test_what_was_taken_between_two_readings_is_not_counted_twice() -> None:
    """The old reading does not know of it yet."""
    machine = Machine(size=1000)
    budget = budget_on(machine)
    assert budget.update(0) == 800
    machine.now, machine.held = 0.5, 700
    assert budget.update(700) == 800


def test_machine_is_asked_once_a_second_at_most() -> None:
    machine = Machine()
    budget = budget_on(machine)
    for _ in range(1000):
        budget.update(0)
        machine.now += 0.01
    assert 9 <= machine.num_reads <= 11


def test_missing_memory_lowers_the_budget_at_the_next_reading_by_what_is_missing() -> None:
    machine = Machine(size=1000)
    budget = budget_on(machine)
    budget.update(0)
    machine.others, machine.now = 500, 1.0
    assert budget.update(0) == 400


def test_budget_rises_only_after_it_was_higher_for_some_seconds() -> None:
    machine = Machine(size=1000, others=500)
    budget = budget_on(machine)
    budget.update(0)
    machine.others = 0
    assert at(budget, machine, 5.5) == 400
    assert at(budget, machine, 6.5) == 800


def test_short_drop_in_a_rise_starts_it_again() -> None:
    machine = Machine(size=1000, others=500)
    budget = budget_on(machine)
    budget.update(0)
    machine.others = 0
    at(budget, machine, 4.5)
    machine.others = 500
    at(budget, machine, 5.5)
    machine.others = 0
    assert at(budget, machine, 10.5) == 400
    assert at(budget, machine, 12) == 800


def test_budget_rises_to_the_lowest_of_the_readings_that_were_higher() -> None:
    machine = Machine(size=1000, others=500)
    budget = budget_on(machine)
    budget.update(0)
    machine.others = 0
    at(budget, machine, 3)
    machine.others = 300
    at(budget, machine, 4.5)
    machine.others = 0
    assert at(budget, machine, 7) == 560


def test_nothing_left_is_zero_not_less() -> None:
    assert budget_on(Machine(size=1000, others=1000), reserve=50).update(0) == 0


def test_other_process_with_half_of_the_memory_turns_the_limit_twice_at_most() -> None:
    machine = Machine()

    def change(now: float) -> None:
        machine.others = machine.size // 2 if 10 <= now < 30 else 0

    arena = simulate(machine, 60, change)
    assert turns(arena.limits) == 1  # down, and up again
    assert {arena.limits[i * 20] for i in (5, 20, 50)} == {25, 12}
    assert machine.held + machine.others <= machine.size


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_three_percent_never_makes_the_limit_swing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    machine = Machine(distort=lambda free: int(free * rng.uniform(0.97, 1.03)))
    arena = simulate(machine, 300, undisturbed)
    assert turns(arena.limits) == 0
    assert arena.limits[-1] >= 0.9 * arena.limits[0]


def test_noisy_machine_that_gets_its_memory_back_is_used_again() -> None:
    rng = np.random.default_rng(7)
    machine = Machine(distort=lambda free: int(free * rng.uniform(0.97, 1.03)))

    def change(now: float) -> None:
        machine.others = machine.size // 2 if now < 30 else 0

    arena = simulate(machine, 200, change)
    assert turns(arena.limits) <= 2
    assert arena.limits[-1] >= 22


def failing(machine: Machine, when: Callable[[], bool], error: Exception) -> Callable[[int], int]:
    def distort(free: int) -> int:
        if when():
            raise error
        return free

    return distort


ERRORS = [NVMLError("Not Supported"), RuntimeError("CUDA error"), FileNotFoundError("memory.max")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_reading_that_fails_keeps_the_last_number_and_is_told_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    machine.distort = failing(machine, lambda: 3 < machine.now % 10 < 7, error)
    arena = simulate(machine, 40, undisturbed)
    assert set(arena.limits) == {25}
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert str(error) in warned[0].getMessage()


def test_fall_after_a_failed_reading_is_seen() -> None:
    machine = Machine(size=1000)
    budget = budget_on(machine)
    budget.update(0)
    machine.distort = failing(machine, lambda: machine.now < 3, NVMLError())
    assert at(budget, machine, 2) == 800
    machine.others = 600
    assert at(budget, machine, 4) == 320


def test_memory_that_can_never_be_read_leaves_the_cache_what_it_holds() -> None:
    """A MIG slice whose memory NVML does not tell."""
    machine = Machine()
    machine.distort = failing(machine, lambda: True, NVMLError("Not Supported"))
    arena = simulate(machine, 10, undisturbed)
    assert set(arena.limits) == {1}
    assert arena.claimed == ROW


def random_series(rng: np.random.Generator, machine: Machine) -> Iterator[int]:
    """What others take, changing now and then, by anything up to all of it."""
    others = 0
    while True:
        if rng.random() < 0.02:
            others = int(rng.uniform(0, 1) * machine.size)
        yield others


@pytest.mark.parametrize("seed", range(10))
def test_any_series_leaves_a_row_and_never_more_claims_than_the_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    machine = Machine(distort=lambda free: int(free * rng.uniform(0.97, 1.03)))
    series = random_series(rng, machine)
    num_events = 0

    def change(now: float) -> None:
        nonlocal num_events
        others = next(series)
        num_events += others != machine.others
        machine.others = others

    arena = Arena(machine, budget_on(machine))
    while machine.now < 100:
        change(machine.now)
        arena.step()
        assert arena.limits[-1] >= 1
        assert arena.claimed <= max(ROW, arena.totals[-1])
        machine.now += 0.25
    assert turns(arena.limits) <= 2 * num_events


def test_two_servers_on_one_device_never_claim_the_same_bytes_for_long() -> None:
    """Each sees what the other has taken as soon as it is touched."""
    first, second = Machine(), Machine()
    arenas = [Arena(machine, budget_on(machine)) for machine in (first, second)]
    for _ in range(1200):
        for machine, other, arena in zip((first, second), (second, first), arenas, strict=True):
            machine.others = other.held
            arena.step()
            machine.now += 0.05
    assert first.held + second.held <= first.size
    assert min(arena.limits[-1] for arena in arenas) >= 1
    assert all(turns(arena.limits) == 0 for arena in arenas)
