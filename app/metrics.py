"""The Prometheus observer: hears what the engines do and counts it. Decides nothing.

Names and bucket edges follow vLLM's (DESIGN 7), with our prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from . import histogram as batched
from .arena import KVUsage
from .backlog import Backlog
from .busy import BusyRatio
from .sequence import Sequence, StepPlan

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_ITL_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_MODEL_LABELS = ("model", "precision", "form", "provider", "fallback")
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """All metrics of one server, in `registry`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        slow_step_seconds: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Off: a second series for each, which nothing reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.current: EngineMetrics | None = None  # of the engine that new requests go to
        self._engines: list[EngineMetrics] = []
        self._slow_step_seconds = slow_step_seconds
        self._clock = clock

        def histogram(name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"phi_serve_{name}", help_, buckets=buckets, registry=registry)

        def gauge(name: str, help_: str) -> Gauge:
            return Gauge(f"phi_serve_{name}", help_, registry=registry)

        def counter(name: str, help_: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"phi_serve_{name}", help_, labels, registry=registry)

        self._ttft = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS
        )
        self._itl = batched.Histogram(
            "phi_serve_inter_token_latency_seconds",
            *("Between tokens of one request.", _ITL_BUCKETS, registry),
        )
        self._queue = histogram(
            "request_queue_time_seconds", "From arrival to admission.", _REQUEST_BUCKETS
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS
        )
        self._batch = histogram("batch_size", "Rows that run in a step.", _BATCH_BUCKETS)
        registry.register(_ModelInfo(self))
        limit = gauge(
            "batch_limit", "Most rows that may run: fewer than at first where memory is short."
        )
        limit.set_function(lambda: self.current.batch_limit if self.current else 0)
        running = gauge("num_requests_running", "Requests in the batch.")
        running.set_function(lambda: sum(engine.num_running for engine in self._engines))
        waiting = gauge("num_requests_waiting", "Requests in the queue.")
        waiting.set_function(lambda: sum(engine.num_waiting for engine in self._engines))
        busy = gauge(
            "engine_busy_ratio",
            "Share of the time with work, of the last 10 s, that is spent inside the model.",
        )
        busy.set_function(self._busy_ratio)
        self._slow_steps = counter("slow_steps_total", "Steps longer than SLOW_STEP_MS.")
        self._ready = gauge("ready", "1 if requests should come here, as /health/ready says.")
        self._queued_tokens = gauge("queued_prompt_tokens", "Prompt tokens of the queue.")
        self._wait = gauge(
            "estimated_wait_seconds", "Expected in the queue, for a request that comes now."
        )
        self._prompt = counter(
            "prompt_tokens_total", "Prompt tokens read, also once more after a preemption."
        )
        self._queried = counter(
            "prefix_cache_query_tokens_total", "Prompt tokens that the cache was asked for."
        )
        self._hits = counter(
            "prefix_cache_hit_tokens_total", "Prompt tokens that it had, and that were not read."
        )
        self._generated = counter("generation_tokens_total", "Tokens generated.")
        self._preemptions = counter(
            "num_preemptions_total",
            "Running requests that had to make room for older ones, and are read again later.",
        )
        usage = gauge("kv_cache_usage_ratio", "Cached tokens of running requests, of the budget.")
        usage.set_function(lambda: self.current.usage_ratio if self.current else 0)
        self._success = counter(
            "request_success_total",
            "Choices (of a request, n) ended by the engine.",
            ("finish_reason",),
        )
        self._spoiled = counter(
            "non_finite_logits_total", "Requests failed by logits that were not finite."
        )
        self._rejected = counter(
            "requests_rejected_total",
            "Requests answered with an error, by its code.",
            ("reason",),
        )

    def watch(self, backlog: Callable[[], Backlog], is_ready: Callable[[], bool]) -> None:
        """What they return is asked when the metrics are read, on the hub."""
        self._ready.set_function(is_ready)
        self._queued_tokens.set_function(lambda: backlog().num_prompt_tokens)
        self._wait.set_function(lambda: backlog().next_place("").seconds)

    def stepped(self, plan: StepPlan) -> None:
        self._batch.observe(plan.num_rows)
        if plan.prefill is not None:
            self._prompt.inc(len(plan.prefill.token_ids))
            sequence = plan.prefill.sequence
            if sequence.num_preemptions == 0 and plan.prefill.start == sequence.num_reused:
                self._queried.inc(len(sequence.prompt_ids))
                self._hits.inc(sequence.num_reused)

    def preempted(self, num_sequences: int) -> None:
        self._preemptions.inc(num_sequences)

    def _busy_ratio(self) -> float:
        sums = [engine.busy.sums() for engine in self._engines]
        work_seconds = sum(work for _, work in sums)
        return sum(model for model, _ in sums) / work_seconds if work_seconds > 0 else 0.0

    def stepped_in(self, step_seconds: float) -> None:
        if step_seconds > self._slow_step_seconds:
            self._slow_steps.inc()

    def spoiled(self, num_rows: int) -> None:
        """So many rows of a step had logits that were not finite."""
        self._spoiled.inc(num_rows)

    def advanced(self, sequences: list[Sequence], now: float) -> None:
        """A token of each of `sequences` came at `now`; their stamps are those before it."""
        self._generated.inc(len(sequences))
        before = [sequence.last_token_at for sequence in sequences]
        self._itl.observe(now - at for at in before if at is not None)
        if None in before:
            for sequence in sequences:
                self._begun(sequence, now)

    def _begun(self, sequence: Sequence, now: float) -> None:
        if sequence.last_token_at is not None:
            return
        self._ttft.observe(now - sequence.arrived_at)
        if sequence.admitted_at is not None:
            self._queue.observe(sequence.admitted_at - sequence.arrived_at)

    def finished(self, sequence: Sequence) -> None:
        if sequence.finish_reason is not None:
            self._success.labels(sequence.finish_reason.value).inc()
        if sequence.last_token_at is not None:
            self._e2e.observe(sequence.last_token_at - sequence.arrived_at)

    def rejected(self, code: str) -> None:
        self._rejected.labels(code).inc()

    def of_engine(self) -> EngineMetrics:
        """The observer of one more engine; the first is the current one."""
        engine = EngineMetrics(self, self._clock)
        self.current = self.current or engine
        self._engines = [*self._engines, engine]  # a scrape may be going through the old list
        return engine

    def forget(self, engine: EngineMetrics) -> None:
        """It has ended. What it has counted stays counted."""
        self._engines = [each for each in self._engines if each is not engine]


class _ModelInfo(Collector):
    """The current model, as labels of a 1; no sample until one is loaded."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "phi_serve_model_info",
            "The model that is served. fallback 1: on the CPU, though a GPU was wanted.",
            labels=_MODEL_LABELS,
        )
        engine = self._metrics.current
        if engine is not None and engine.model is not None:
            family.add_metric([str(engine.model[label]) for label in _MODEL_LABELS], 1)
        yield family


class EngineMetrics:
    """The observer of one engine. While models are switched there are two: requests in their queues
    and batches add up, `batch_limit` and `usage` are those of the current one."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self.busy = BusyRatio(clock)
        self.num_waiting = self.num_running = self.batch_limit = 0
        self.model: dict[str, Any] | None = None  # once loaded: a value for each of _MODEL_LABELS
        self.usage: KVUsage | None = None

    def loaded(self, info: dict[str, Any]) -> None:
        """The engine's model, as `/info` tells it."""
        self.model = info | {"fallback": int(info["device_fallback"])}

    @property
    def usage_ratio(self) -> float:
        return self.usage.ratio if self.usage is not None else 0.0

    def preempted(self, num_sequences: int) -> None:
        self._metrics.preempted(num_sequences)

    def stepped(self, plan: StepPlan) -> None:
        self._metrics.stepped(plan)

    def timed(self, model_seconds: float, step_seconds: float, work_seconds: float) -> None:
        self._metrics.stepped_in(step_seconds)
        self.busy.add(model_seconds, work_seconds)

    def spoiled(self, num_rows: int) -> None:
        self._metrics.spoiled(num_rows)

    def advanced(self, sequences: list[Sequence], now: float) -> None:
        self._metrics.advanced(sequences, now)

    def finished(self, sequence: Sequence) -> None:
        self._metrics.finished(sequence)

    def counted(self, num_waiting: int, num_running: int) -> None:
        self.num_waiting, self.num_running = num_waiting, num_running

    def limited(self, batch_limit: int) -> None:
        self.batch_limit = batch_limit

    def held(self, usage: KVUsage) -> None:
        self.usage = usage
