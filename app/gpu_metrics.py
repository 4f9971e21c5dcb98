"""Metrics of the GPU: absent, not 0, where nobody can tell.

A thread of its own asks the driver every second, for that may block; a scrape takes what it has
heard last. Where the driver has been silent for long, that is nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from .gpu_driver import Driver, Reading
from .metric_families import PREFIX, unit_of

_PERIOD_SECONDS = 1.0
_OLD_SECONDS = 10.0
_NUM_READINGS = 10  # that the utilization is the mean of: the driver's are of a moment


class _Heard(NamedTuple):
    at: float
    reading: Reading


class GpuMetrics(Collector):
    """In `registry` from the start, with samples once `watch` has begun to ask."""

    def __init__(
        self,
        registry: CollectorRegistry,
        read: Callable[[], Reading] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read or Driver().read
        self._clock = clock
        self._heard: _Heard | None = None  # replaced as a whole: one thread writes, another reads
        self._utilizations: deque[float] = deque(maxlen=_NUM_READINGS)
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        registry.register(self)

    def watch(self) -> None:
        """A model runs on a GPU: asks from now on. Once is enough."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="gpu-metrics", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _keep(self) -> None:
        while not self._stopped.is_set():
            self.ask()
            self._stopped.wait(_PERIOD_SECONDS)

    def ask(self) -> None:
        """Takes a reading. It may block, and never raises."""
        reading = self._read()
        if reading.utilization is None:
            self._utilizations.clear()
        else:
            self._utilizations.append(reading.utilization)
            mean = sum(self._utilizations) / len(self._utilizations)
            reading = reading._replace(utilization=mean)
        self._heard = _Heard(self._clock(), reading)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        heard = self._heard
        is_old = heard is None or self._clock() - heard.at > _OLD_SECONDS
        reading = Reading(None, None, None) if heard is None or is_old else heard.reading
        yield _gauge(
            "gpu_utilization_ratio",
            "Share of the last 10 s in which the GPU ran anything, as its driver says.",
            reading.utilization,
        )
        yield _gauge("gpu_memory_used_bytes", "Of the GPU, by all processes.", reading.used_bytes)
        yield _gauge("gpu_memory_free_bytes", "Of the GPU.", reading.free_bytes)


def _gauge(name: str, help_: str, value: float | None) -> GaugeMetricFamily:
    """Without a sample if there is no value."""
    family = GaugeMetricFamily(PREFIX + name, help_, unit=unit_of(name))
    if value is not None:
        family.add_metric([], value)
    return family
