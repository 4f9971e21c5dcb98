"""How full a server says that it is: alone, full, and with a queue."""

from __future__ import annotations

from dataclasses import replace

import gevent
import pytest
from prometheus_client import CollectorRegistry

from app.backlog import Backlog
from app.metrics import Metrics
from app.saturation import Load

from .engines import greedy
from .services import StubService, until
from .test_overload import ask, serving

NUM_ROWS = 16
IDLE = Load(num_running=0, num_waiting=0, batch_limit=NUM_ROWS, kv_usage=0.0, wait_seconds=0.0)


@pytest.mark.parametrize(
    ("load", "factor"),
    [
        (IDLE, 0.0),
        (replace(IDLE, num_running=1), 1 / 16),
        (replace(IDLE, num_running=16), 1.0),
        (replace(IDLE, num_running=16, num_waiting=8), 1.5),
        (replace(IDLE, num_running=1, kv_usage=0.75), 0.75),
        (replace(IDLE, num_running=4, num_waiting=1, wait_seconds=3.0), 0.6),
        (replace(IDLE, num_running=16, num_waiting=4, wait_seconds=20.0), 4.0),
        (replace(IDLE, batch_limit=4, num_running=3), 0.75),
        (replace(IDLE, batch_limit=0, num_waiting=3, wait_seconds=9.0), 0.0),
    ],
)
def test_load_is_the_largest_of_rows_memory_and_wait(load: Load, factor: float) -> None:
    assert load.factor(target_seconds=5.0) == pytest.approx(factor)


def test_it_is_that_of_the_engine_that_new_requests_go_to() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    assert registry.get_sample_value("phi_serve_saturation_ratio") == 0
    old, new = metrics.of_engine(), metrics.of_engine()
    for engine in (old, new):
        engine.limited(4)
    old.counted(num_waiting=0, num_running=4)
    new.counted(num_waiting=0, num_running=1)
    assert registry.get_sample_value("phi_serve_saturation_ratio") == 1
    metrics.current = new
    assert registry.get_sample_value("phi_serve_saturation_ratio") == 0.25


def told(service: StubService) -> tuple[float, float]:
    """Clamped, and not."""
    names = ("saturation_ratio", "load_factor")
    first, second = (service.registry.get_sample_value(f"phi_serve_{name}") for name in names)
    assert first is not None
    assert second is not None
    return first, second


def test_one_user_on_sixteen_rows_never_reads_more_than_a_tenth() -> None:
    with serving(NUM_ROWS) as (service, server, gate):
        gate.is_open = True
        seen = [told(service)]
        job = gevent.spawn(ask, server, prompt="a b c d", max_tokens=30, ignore_eos=True)
        while not job.ready():
            gevent.sleep(0.005)
            seen.append(told(service))
        assert job.get().status == 200
        until(service.is_idle)
        assert told(service) == (0, 0)
        assert max(clamped for clamped, _ in seen) <= 0.1
        assert max(factor for _, factor in seen) <= 0.1


def test_prompt_that_is_being_read_is_no_queue() -> None:
    """Its reading is what the next request would wait for, but none does."""
    with serving(NUM_ROWS, saturation_wait_seconds=1) as (service, server, gate):
        service.bridge.backlog.pace.guess(100.0)
        job = gevent.spawn(ask, server, prompt="a" * 20, max_tokens=1)
        until(lambda: service.stub.plans)
        assert told(service)[0] <= 0.1
        gate.is_open = True
        assert job.get().status == 200


def test_full_batch_with_a_queue_reads_above_one_and_the_ratio_stays_one() -> None:
    with serving(NUM_ROWS) as (service, server, gate):
        jobs = [gevent.spawn(ask, server, max_tokens=30, ignore_eos=True) for _ in range(24)]
        until(lambda: service.bridge.backlog.num_sequences == 23)  # and one is being read
        clamped, factor = told(service)
        assert clamped == 1.0
        assert factor > 1.0
        gate.is_open = True
        assert [job.get().status for job in jobs] == [200] * 24
        until(service.is_idle)
        assert told(service) == (0, 0)


@pytest.mark.parametrize("target_seconds", [1.0, 4.0])
def test_wait_of_the_queue_counts_by_the_target_that_is_set(target_seconds: float) -> None:
    registry, backlog = CollectorRegistry(), Backlog()
    metrics = Metrics(registry, wait_target_seconds=target_seconds)
    metrics.watch(lambda: backlog, lambda: True)
    engine = metrics.of_engine()
    engine.limited(NUM_ROWS)
    backlog.pace.guess(1.0)
    backlog.add([greedy("waits", [1, 2, 3])] * 3)
    engine.counted(num_waiting=3, num_running=0)
    seconds = backlog.next_place("").seconds
    assert seconds >= 3
    factor = registry.get_sample_value("phi_serve_load_factor")
    assert factor == pytest.approx(seconds / target_seconds)
    engine.counted(num_waiting=0, num_running=0)
    assert registry.get_sample_value("phi_serve_load_factor") == pytest.approx(3 / NUM_ROWS)
