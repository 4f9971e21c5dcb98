"""The step: plan, forward, sample, commit. Knows token ids only, and nothing of threads or HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .arena import KVUsage
from .backlog import Backlog
from .masks import MaskWorker
from .sampler import Sampled, sample
from .scheduler import Scheduler
from .sequence import Advance, SamplingParams, Sequence, StepPlan

if TYPE_CHECKING:
    from .kv_cache import KVCache  # brings torch, which a stub does without

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25  # between looks at the memory, which is read once a second
_NUM_FAILED = 2  # steps in a row that tell of the model, not of a request
_OUT_OF_MEMORY = (
    "out of memory",  # CUDA, torch
    "failed to allocate memory",  # ONNX Runtime's arena
    "smaller than requested bytes",  # likewise, on CUDA
    "can't allocate memory",  # torch on the CPU
    "cannot allocate memory",  # the kernel, to mmap
    "bad_alloc",
    "bad allocation",
)


Logits = Any  # (rows, vocab): an array, or what the engine's sampler takes


class Model(Protocol):
    """What the engine needs of a model; tests hand in their own.

    It may have `prefill_seconds`, what the prefill of its last plan took.
    """

    def forward(self, plan: StepPlan, cache: KVCache) -> Logits:
        """Runs the plan; logits `(len(plan.sampled), vocab)`, valid until the next call."""


class Sampler(Protocol):
    """What `sampler.sample` is."""

    def __call__(
        self, logits: Logits, sequences: list[Sequence], masks: Mapping[int, NDArray[np.uint32]]
    ) -> Sampled: ...


class Observer(Protocol):
    """Hears what happens; never decides anything."""

    def preempted(self, num_sequences: int) -> None: ...
    def stepped(self, plan: StepPlan) -> None: ...
    def timed(self, model_seconds: float, step_seconds: float, work_seconds: float) -> None: ...
    def spoiled(self, num_rows: int) -> None: ...
    def advanced(self, sequences: list[Sequence], now: float) -> None: ...
    def finished(self, sequence: Sequence) -> None: ...
    def counted(self, num_waiting: int, num_running: int) -> None: ...
    def limited(self, batch_limit: int) -> None: ...
    def held(self, usage: KVUsage) -> None: ...


class Unobserved:
    """An observer that lets everything pass."""

    def preempted(self, num_sequences: int) -> None: ...
    def stepped(self, plan: StepPlan) -> None: ...
    def timed(self, model_seconds: float, step_seconds: float, work_seconds: float) -> None: ...
    def spoiled(self, num_rows: int) -> None: ...
    def advanced(self, sequences: list[Sequence], now: float) -> None: ...
    def finished(self, sequence: Sequence) -> None: ...
    def counted(self, num_waiting: int, num_running: int) -> None: ...
    def limited(self, batch_limit: int) -> None: ...
    def held(self, usage: KVUsage) -> None: ...


class Engine:
    """Owns model, cache and scheduler. One thread at a time may call it."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        scheduler: Scheduler,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
        num_threads: int = 1,  # for masks, beside the model's
        sampler: Sampler | None = None,  # one that takes the model's logits; None: `sample`
        budget: Callable[[int], int] | None = None,
        idle_seconds: float = 0.0,
    ) -> None:
        """`budget` tells the bytes that the cache may take, of those that it holds; None: it never
        changes. Idle for `idle_seconds`, the engine gives the cache's memory back; 0: it never
        does."""
        self._model = model
        self._cache = cache
        self._scheduler = scheduler
        self._observer = observer
        self._clock = clock
        self._masks = MaskWorker(num_threads)
        self._sampler = sampler
        self.backlog = Backlog()  # hears of each step; the bridge puts its own here
        # In a row; apart, for a good prompt says nothing of a decode that always fails.
        self._num_failed = {"prefill": 0, "decode": 0}
        self._is_tested = False  # by itself
        self._budget = budget
        self._look_at = 0.0
        self._idle_seconds = idle_seconds
        self._worked_at: float | None = None  # None: nothing to give back
        self._model_seconds = 0.0  # of this step
        self._left_at: float | None = None  # the end of the step before, if it left work
        self.num_steps = 0  # that ran something, well or not
        self._tell_limits()

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_idle

    @property
    def has_failed(self) -> bool:
        """The last two steps or more have failed, or the last self-test."""
        return max(self._num_failed.values()) >= _NUM_FAILED

    def submit(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)

    def end(self, sequence: Sequence) -> None:
        """Its `ended_by` is set. One that waits is told in the next step, without a look at the
        others."""
        self._scheduler.end(sequence)

    def step(self) -> list[Advance]:
        """Runs one step; what it brought each sequence.

        A model that raises costs the sequences of that step an error, never the engine.
        """
        started_at = self._clock()
        self._look_at_memory(started_at)
        self._model_seconds = 0.0
        plan = self._scheduler.plan()
        self._tell_plan(plan)
        self.num_steps += not plan.is_empty
        try:
            plan = self._prepare(plan)
            sampled = self._run(plan)
            advances = self._scheduler.commit(plan, sampled)
            if plan.sampled:  # a step of which no row can be trusted is no good one
                self._count(plan, is_good=bool(sampled.is_finite.any()))
        except Exception as error:
            self._count(plan, is_good=False)
            advances = self._scheduler.fail(plan, f"the model run failed: {type(error).__name__}")
            log.exception("step failed: %d sequences end with an error", len(advances))
        self._observe(plan, advances, started_at)
        return advances

    def _count(self, plan: StepPlan, *, is_good: bool) -> None:
        for kind, has_run in (("prefill", plan.prefill is not None), ("decode", bool(plan.decode))):
            if has_run:
                self._num_failed[kind] = 0 if is_good else self._num_failed[kind] + 1

    def _look_at_memory(self, now: float) -> None:
        if self._budget is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        held = self._cache.bytes_held(self._scheduler.num_written)
        self._scheduler.arena.budget = self._budget(held)

    def _prepare(self, plan: StepPlan) -> StepPlan:
        """Makes the cache what the plan asks for. Where memory for that runs out, a plan of nothing
        instead: its sequences wait again, and no token is lost."""
        try:
            self._cache.apply(plan.moves)
            if plan.resize is not None:
                self._cache.resize(plan.resize)
            return plan
        except Exception as error:
            # Also where the moves failed: the arena has the new size already, the cache has not.
            self._scheduler.arena.lose()
            if plan.num_rows == 1 or not _is_out_of_memory(error):
                raise
        retreat = self._scheduler.retreat(plan)
        log.warning("out of memory: %d requests wait to be read again", len(retreat.preempted))
        self._tell_plan(retreat)
        return retreat

    def _run(self, plan: StepPlan) -> Sampled:
        if plan.is_empty:
            return sample(np.empty((0, 1), np.float32), [])
        self._masks.start(plan.sampled)  # they are filled while the model runs
        asked_at = self._clock()
        try:
            logits = self._forward(plan)
        finally:
            self._model_seconds = self._clock() - asked_at
        choose, masks = self._sampler or sample, self._masks.collect()
        asked_at = self._clock()
        sampled = choose(logits, plan.sampled, masks)
        if not isinstance(logits, np.ndarray):  # a run on a GPU is only queued: this waits for it
            self._model_seconds += self._clock() - asked_at
        if num_spoiled := int(np.count_nonzero(~sampled.is_finite)):
            log.error("logits are not finite in %d of %d rows", num_spoiled, len(plan.sampled))
            self._tell(self._observer.spoiled, num_spoiled)
        return sampled

    def _forward(self, plan: StepPlan) -> Logits:
        """Where memory runs out, once more in smaller runs. No token is lost or doubled by that:
        only `commit` counts tokens as cached, and keys that a broken run has written already lie
        where the same ones are written again."""
        try:
            return self._model.forward(plan, self._cache)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
        # Behind the handler: the error holds on to what the broken run had in hand.
        smaller = self._scheduler.shrink(plan)
        log.warning("out of memory: a step runs again, %d rows at a time", smaller.rows_per_run)
        return self._model.forward(smaller, self._cache)

    def _observe(self, plan: StepPlan, advances: list[Advance], started_at: float) -> None:
        now = self._clock()
        if plan.prefill is not None and plan.prefill.sequence.admitted_at is None:
            plan.prefill.sequence.admitted_at = started_at
        advanced = [each.sequence for each in advances if each.token_id is not None]
        self._tell(self._observer.advanced, advanced, now)
        for sequence in advanced:
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            sequence.last_token_at = now
        for advance in advances:
            if advance.finish_reason is not None:
                self._tell(self._observer.finished, advance.sequence)
                if not self._is_tested:
                    self._tell(self.backlog.finished, advance.sequence)
        scheduler = self._scheduler
        if not plan.is_empty:
            self._tell(self._observer.stepped, plan)
            waited_at = started_at if self._left_at is None else self._left_at
            times = (self._model_seconds, now - started_at, now - waited_at)
            self._tell(self._observer.timed, *times)
            if not self._is_tested:
                self._tell(self.backlog.stepped, plan, now - started_at)
                if not any(advance.error for advance in advances):  # else it may have broken off
                    alone = getattr(self._model, "prefill_seconds", None)
                    budget = self._scheduler.prefill_budget
                    self._tell(budget.stepped, plan, now - started_at, alone)
                self._worked_at = now
        self._left_at = None if scheduler.is_idle else now
        self._tell(self._observer.counted, scheduler.num_waiting, scheduler.num_running)
        self._tell_limits()

    def _tell_plan(self, plan: StepPlan) -> None:
        self._tell(self.backlog.planned, plan)
        if plan.preempted:
            self._tell(self._observer.preempted, len(plan.preempted))

    def _tell_limits(self) -> None:
        usage = self._scheduler.usage
        self._tell(self._observer.limited, usage.batch_limit)
        self._tell(self._observer.held, usage)

    @property
    def seconds_to_rest(self) -> float | None:
        """Until `rest` is due, if nothing comes; None if it is not."""
        if self._worked_at is None or not self._idle_seconds:
            return None
        return max(0.0, self._worked_at + self._idle_seconds - self._clock())

    def rest(self) -> None:
        """Nothing has run for long: gives back the cache's memory."""
        self._worked_at = None
        try:
            self._cache.resize(self._scheduler.rest())
        except Exception:  # the next step tries again
            self._scheduler.arena.lose()
            log.exception("the KV cache cannot be made smaller")
        self._tell_limits()

    @staticmethod
    def _tell(hear: Callable[..., None], *news: object) -> None:
        """Who only hears of it costs nobody a token by failing."""
        try:
            hear(*news)
        except Exception:
            log.exception("%s failed", getattr(hear, "__qualname__", "the observer"))

    def self_test(self) -> None:
        """Generates one token, and one more if it was decode that failed last; raises RuntimeError
        if the model cannot.

        A failure counts as more than a request's would: no client's input can be at fault.
        """
        num_tokens = 1 + (self._num_failed["decode"] > 0)
        params = SamplingParams(num_tokens, ignore_eos=True)
        probe = Sequence("self-test", [0], params, owner="(self-test)")
        # It is nobody's request, and not what a step of theirs takes.
        observer, self._observer, self._is_tested = self._observer, Unobserved(), True
        started_at = self._clock()
        self.submit(probe)
        self.step()
        seconds = self._clock() - started_at
        self.backlog.pace.guess(seconds)
        self._scheduler.prefill_budget.guess(seconds)
        while not probe.is_finished:
            self.step()
        self.step()  # drops its row
        self._observer, self._is_tested = observer, False
        if probe.error is not None:
            kind = "decode" if probe.output_ids else "prefill"
            self._num_failed[kind] = max(self._num_failed[kind], _NUM_FAILED)
            raise RuntimeError(f"the self-test failed: {probe.error}")


def _is_out_of_memory(error: Exception) -> bool:
    """torch, ONNX Runtime and CUDA have no exception in common: their words must tell."""
    return isinstance(error, MemoryError) or any(
        words in str(error).lower() for words in _OUT_OF_MEMORY
    )
