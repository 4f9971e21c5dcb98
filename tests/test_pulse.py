"""Progress, on a clock that stands still."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.pulse import Pulse


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def pulse(clock: SimpleNamespace) -> Pulse:
    return Pulse(60, lambda: clock.now)


def test_work_without_progress_is_a_stall_behind_the_limit_only(
    clock: SimpleNamespace, pulse: Pulse
) -> None:
    pulse.beat()
    clock.now += 60
    assert pulse.stalled_seconds is None
    clock.now += 1
    assert pulse.stalled_seconds == 61


def test_each_beat_begins_the_time_anew(clock: SimpleNamespace, pulse: Pulse) -> None:
    for _ in range(40):
        pulse.beat()
        clock.now += 59
        assert pulse.stalled_seconds is None


def test_rest_is_no_stall(clock: SimpleNamespace, pulse: Pulse) -> None:
    pulse.beat()
    pulse.rest()
    clock.now += 10_000
    assert pulse.stalled_seconds is None


def test_stage_tells_its_own_time_and_that_of_all(clock: SimpleNamespace, pulse: Pulse) -> None:
    pulse.enter("reading the graph")
    clock.now += 3
    pulse.enter("loading weights")
    clock.now += 20
    assert pulse.stage == "loading weights for 20 s, 23 s in all"
