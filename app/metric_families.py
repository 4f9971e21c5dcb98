"""The catalogue: every series that the observer writes, with its help, its unit and its buckets.

Names and bucket edges follow vLLM's (DESIGN 7), with our prefix. The unit is the name's ending.
Nothing here counts: `metrics.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)

from . import histogram as batched
from .errors import all_codes
from .sequence import FinishReason

PREFIX = "phi_serve_"
_UNITS = ("seconds", "tokens", "ratio", "bytes")
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_ITL_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_STEP_BUCKETS = (0.001, 0.0025, *_ITL_BUCKETS)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OTHER = "other"  # for an error that nobody foresaw: a label must not grow
REASONS = (*sorted(all_codes()), OTHER)


def unit_of(name: str) -> str:
    """That OpenMetrics is told; empty where the name has none."""
    ending = name.removesuffix("_total").rpartition("_")[2]
    return ending if ending in _UNITS else ""


class Families:
    """All of one server, in `registry`. Gauges that are read off something have no value yet."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Off: a second series for each, which nothing reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        self._add_histograms()
        self._add_gauges()
        self._add_counters()

    def _add_histograms(self) -> None:
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS
        )
        name = "inter_token_latency_seconds"
        self.itl = batched.Histogram(
            *(PREFIX + name, "Between tokens of one request.", _ITL_BUCKETS, self._registry),
            unit=unit_of(name),
        )
        self.queue = self._histogram(
            "request_queue_time_seconds", "From arrival to admission.", _REQUEST_BUCKETS
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS
        )
        self.batch = self._histogram("batch_size", "Rows that run in a step.", _BATCH_BUCKETS)
        self.step = self._histogram(
            "step_duration_seconds", "A step, from its plan to its tokens.", _STEP_BUCKETS
        )

    def _add_gauges(self) -> None:
        self.limit = self._gauge(
            "batch_limit", "Most rows that may run: fewer than at first where memory is short."
        )
        self.running = self._gauge("num_requests_running", "Requests in the batch.")
        self.waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self.busy = self._gauge(
            "engine_busy_ratio",
            "Share of the time with work, of the last 10 s, that is spent inside the model.",
        )
        self.ready = self._gauge("ready", "1 if requests should come here, as /health/ready says.")
        self.queued_tokens = self._gauge("queued_prompt_tokens", "Prompt tokens of the queue.")
        self.wait = self._gauge(
            "estimated_wait_seconds", "Expected in the queue, for a request that comes now."
        )
        self.usage = self._gauge(
            "kv_cache_usage_ratio", "Cached tokens of running requests, of the budget."
        )
        self.saturation = self._gauge(
            "saturation_ratio", "load_factor, 1 at the most: 1 is a server that is full."
        )
        self.load = self._gauge(
            "load_factor",
            "Largest of: requests by rows, KV cache used, wait in the queue by its target.",
        )

    def _add_counters(self) -> None:
        self.slow_steps = self._counter("slow_steps_total", "Steps longer than SLOW_STEP_MS.")
        self.prompt = self._counter(
            "prompt_tokens_total", "Prompt tokens read, also once more after a preemption."
        )
        self.queried = self._counter(
            "prefix_cache_query_tokens_total", "Prompt tokens that the cache was asked for."
        )
        self.hits = self._counter(
            "prefix_cache_hit_tokens_total", "Prompt tokens that it had, and that were not read."
        )
        self.generated = self._counter("generation_tokens_total", "Tokens generated.")
        self.preemptions = self._counter(
            "num_preemptions_total",
            "Running requests that had to make room for older ones, and are read again later.",
        )
        self.spoiled = self._counter(
            "non_finite_logits_total", "Requests failed by logits that were not finite."
        )
        self.success = self._counter(
            "request_success_total",
            "Choices (of a request, n) ended by the engine.",
            ("finish_reason",),
        )
        self.rejected = self._counter(
            "requests_rejected_total",
            "Requests answered with an error, by its code.",
            ("reason",),
        )
        # From the start, so that a rate has the first one, too.
        for finish_reason in FinishReason:
            self.success.labels(finish_reason.value)
        for reason in REASONS:
            self.rejected.labels(reason)

    def _histogram(self, name: str, help_: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(
            *(PREFIX + name, help_),
            unit=unit_of(name),
            buckets=tuple(buckets),
            registry=self._registry,
        )

    def _gauge(self, name: str, help_: str) -> Gauge:
        return Gauge(PREFIX + name, help_, unit=unit_of(name), registry=self._registry)

    def _counter(self, name: str, help_: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(PREFIX + name, help_, labels, unit=unit_of(name), registry=self._registry)
