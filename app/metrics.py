"""The Prometheus observer: hears what the engines do and counts it. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from .arena import KVUsage
from .backlog import Backlog
from .busy import BusyRatio
from .metric_families import OTHER, PREFIX, REASONS, Families
from .saturation import Load
from .sequence import Sequence, StepPlan
from .slow_steps import SlowSteps

_MODEL_LABELS = ("model", "precision", "form", "provider", "fallback")


class Metrics:
    """All metrics of one server, in `registry`.

    `wait_target_seconds` is what a wait in the queue is held against.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        slow_step_seconds: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
        wait_target_seconds: float = 5.0,
    ) -> None:
        self.current: EngineMetrics | None = None  # of the engine that new requests go to
        self._engines: list[EngineMetrics] = []
        self._slow_steps = SlowSteps(slow_step_seconds, clock)
        self._clock = clock
        self._wait_target = wait_target_seconds
        self._backlog: Callable[[], Backlog] | None = None
        self._families = families = Families(registry)
        registry.register(_ModelInfo(self))
        families.limit.set_function(lambda: self.current.batch_limit if self.current else 0)
        families.usage.set_function(lambda: self.current.usage_ratio if self.current else 0)
        families.running.set_function(lambda: sum(each.num_running for each in self._engines))
        families.waiting.set_function(lambda: sum(each.num_waiting for each in self._engines))
        families.busy.set_function(self._busy_ratio)
        families.load.set_function(self._load_factor)
        families.saturation.set_function(lambda: min(1.0, self._load_factor()))

    def watch(self, backlog: Callable[[], Backlog], is_ready: Callable[[], bool]) -> None:
        """What they return is asked when the metrics are read, on the hub."""
        self._backlog = backlog
        self._families.ready.set_function(is_ready)
        self._families.queued_tokens.set_function(lambda: backlog().num_prompt_tokens)
        self._families.wait.set_function(lambda: backlog().next_place("").seconds)

    def _busy_ratio(self) -> float:
        sums = [engine.busy.sums() for engine in self._engines]
        work_seconds = sum(work for _, work in sums)
        return sum(model for model, _ in sums) / work_seconds if work_seconds > 0 else 0.0

    def _load_factor(self) -> float:
        """Of the engine that new requests go to."""
        engine = self.current
        if engine is None:
            return 0.0
        num_waiting, seconds = engine.num_waiting, 0.0
        if self._backlog is not None:
            backlog = self._backlog()
            # By the engine's account a step ago: who is taken up at once has never waited.
            seconds = backlog.next_place("").seconds if num_waiting else 0.0
            num_waiting = max(num_waiting, backlog.num_sequences)
        rows = (engine.num_running, num_waiting, engine.batch_limit)
        return Load(*rows, engine.usage_ratio, seconds).factor(self._wait_target)

    def stepped(self, plan: StepPlan) -> None:
        self._families.batch.observe(plan.num_rows)
        if plan.prefill is not None:
            self._families.prompt.inc(len(plan.prefill.token_ids))
            sequence = plan.prefill.sequence
            if sequence.num_preemptions == 0 and plan.prefill.start == sequence.num_reused:
                self._families.queried.inc(len(sequence.prompt_ids))
                self._families.hits.inc(sequence.num_reused)

    def preempted(self, num_sequences: int) -> None:
        self._families.preemptions.inc(num_sequences)

    def stepped_in(self, step_seconds: float, num_rows: int, num_prompt_tokens: int) -> None:
        self._families.step.observe(step_seconds)
        if self._slow_steps.ended(step_seconds, num_rows, num_prompt_tokens):
            self._families.slow_steps.inc()

    def spoiled(self, num_rows: int) -> None:
        """So many rows of a step had logits that were not finite."""
        self._families.spoiled.inc(num_rows)

    def advanced(self, sequences: list[Sequence], now: float) -> None:
        """A token of each of `sequences` came at `now`; their stamps are those before it."""
        self._families.generated.inc(len(sequences))
        before = [sequence.last_token_at for sequence in sequences]
        self._families.itl.observe(now - at for at in before if at is not None)
        if None in before:
            for sequence in sequences:
                self._begun(sequence, now)

    def _begun(self, sequence: Sequence, now: float) -> None:
        if sequence.last_token_at is not None:
            return
        self._families.ttft.observe(now - sequence.arrived_at)
        if sequence.admitted_at is not None:
            self._families.queue.observe(sequence.admitted_at - sequence.arrived_at)

    def finished(self, sequence: Sequence) -> None:
        if sequence.finish_reason is not None:
            self._families.success.labels(sequence.finish_reason.value).inc()
        if sequence.last_token_at is not None:
            self._families.e2e.observe(sequence.last_token_at - sequence.arrived_at)

    def rejected(self, code: str) -> None:
        self._families.rejected.labels(code if code in REASONS else OTHER).inc()

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
            PREFIX + "model_info",
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
        self._step = (0, 0)  # rows, and prompt tokens, of the last one
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
        num_prompt_tokens = len(plan.prefill.token_ids) if plan.prefill else 0
        self._step = (plan.num_rows, num_prompt_tokens)
        self._metrics.stepped(plan)

    def timed(self, model_seconds: float, step_seconds: float, work_seconds: float) -> None:
        """What the step took that `stepped` has told of."""
        self._metrics.stepped_in(step_seconds, *self._step)
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
