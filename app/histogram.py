"""A Prometheus histogram that takes a step's worth of values at once.

prometheus_client's own takes one value at a time, with two locks each: too much for every token.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry


class Histogram(Collector):
    """Thread-safe. `buckets` are upper bounds, rising; one for all values is added."""

    def __init__(
        self,
        name: str,
        help_: str,
        buckets: Sequence[float],
        registry: CollectorRegistry,
        *,
        unit: str = "",
    ) -> None:
        """`unit` is what `name` ends with, if with any."""
        self._name = name
        self._help = help_
        self._unit = unit
        self._bounds = [*buckets, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._lock = threading.Lock()
        registry.register(self)

    def observe(self, values: Iterable[float]) -> None:
        """Equal values cost no more than one, as those of the rows that step together are."""
        with self._lock:
            for value, number in Counter(values).items():
                self._counts[bisect_left(self._bounds, value)] += number
                self._sum += value * number

    def collect(self) -> Iterator[HistogramMetricFamily]:
        with self._lock:
            counts, total = list(accumulate(self._counts)), self._sum
        names = [*map(str, self._bounds[:-1]), "+Inf"]
        buckets = list(zip(names, counts, strict=True))
        yield HistogramMetricFamily(
            self._name, self._help, buckets=buckets, sum_value=total, unit=self._unit
        )

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """So that the registry knows its name from the start."""
        yield from self.collect()
