"""Our metrics in Triton's: every series under the name that `/metrics` of our own server gives it.

Triton's library sets no buckets of a histogram, so each of its series is a counter there; queries
are the same.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

_Labels = tuple[tuple[str, str], ...]


class TritonMetrics:
    """Copies `registry` whenever it is told to. One thread at a time may call it."""

    def __init__(self, pb_utils: Any, registry: CollectorRegistry) -> None:
        self._pb_utils = pb_utils
        self._registry = registry
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, _Labels], Any] = {}
        self._values: dict[tuple[str, _Labels], float] = {}

    def update(self) -> None:
        for family in self._registry.collect():
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                before = self._values.get(key, 0.0)
                if key in self._values and sample.value == before:
                    continue
                metric = self._metric(key, family.documentation, family.type)
                if family.type == "gauge":
                    metric.set(sample.value)
                else:
                    metric.increment(sample.value - before)
                self._values[key] = sample.value

    def _metric(self, key: tuple[str, _Labels], help_: str, type_: str) -> Any:
        """Made when it is first seen."""
        if key not in self._metrics:
            name, labels = key
            if name not in self._families:
                kinds = self._pb_utils.MetricFamily
                kind = kinds.GAUGE if type_ == "gauge" else kinds.COUNTER
                self._families[name] = self._pb_utils.MetricFamily(
                    name=name, description=help_, kind=kind
                )
            self._metrics[key] = self._families[name].Metric(labels=dict(labels))
        return self._metrics[key]
