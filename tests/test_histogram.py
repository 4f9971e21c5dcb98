"""A histogram that takes many values at once, beside prometheus_client's own."""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from app.histogram import Histogram

BUCKETS = (0.005, 0.1, 1.0, 80.0)
VALUES = [0.001, 0.005, 0.0051, 0.1, 0.5, 0.5, 0.5, 1.0, 79.0, 80.0, 81.0, 1000.0]


def test_it_says_what_prometheus_clients_own_says() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("seconds", "Of something.", BUCKETS, ours)
    other = prometheus_client.Histogram(
        "seconds", "Of something.", buckets=BUCKETS, registry=theirs
    )
    for value in VALUES:
        other.observe(value)
    histogram.observe(VALUES[:7])
    histogram.observe(iter(VALUES[7:]))
    histogram.observe([])
    told = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == told
