"""Memory that runs out in a step costs rows of later batches, and no token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from app.batch_limit import BatchLimit
from app.engine import Engine, Model
from app.kv_cache import KVCache
from app.metrics import Metrics
from app.sequence import FinishReason, Sequence, StepPlan

from .conftest import Bring, TinyModel
from .engines import answers, greedy, real_engine, run, stub_answer, stub_engine
from .folders import make_portable

PROMPTS = [[1], [2, 3], [4, 5, 6], [7], [8]]
ERRORS = [
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[ONNXRuntimeError] : 6 : Failed to allocate memory for requested buffer of size"),
    RuntimeError("std::bad_alloc"),
]


def test_limit_halves_to_one_and_no_further() -> None:
    limit = BatchLimit(8)
    found = []
    for num_rows in (8, 4, 2, 1, 1):
        limit.halve(num_rows)
        found.append(limit.value)
    assert found == [4, 2, 1, 1, 1]


def test_limit_halves_what_ran_not_what_might() -> None:
    limit = BatchLimit(32)
    limit.halve(6)
    assert limit.value == 3


def test_limit_grows_by_a_row_with_each_hundred_good_steps_up_to_the_first() -> None:
    limit = BatchLimit(3)
    limit.halve(3)
    found = []
    for _ in range(400):
        limit.recover()
        found.append(limit.value)
    assert [found.index(2), found.index(3), found[-1]] == [99, 199, 3]


def raising_at(step: int, error: Exception) -> Callable[[StepPlan, object], None]:
    calls = count()

    def change(plan: StepPlan, logits: object) -> None:
        if next(calls) == step:
            raise error

    return change


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_step_that_finds_no_memory_runs_again_in_halves_and_loses_nothing(error: Exception) -> None:
    engine, model = stub_engine()
    model.change = raising_at(9, error)
    found = answers(engine, [greedy(str(p), p, 20) for p in PROMPTS])
    assert found == [stub_answer(p, 20) for p in PROMPTS]
    failed, again = model.plans[9:11]
    assert (failed.decode, failed.prefill) == (again.decode, again.prefill)
    assert (failed.rows_per_run, len(again.decode), again.rows_per_run) == (4, 4, 2)
    assert not engine.has_failed


def test_moves_are_made_once() -> None:
    """A row that has moved may lie where another move would take it from again."""
    engine, model = stub_engine()

    def change(plan: StepPlan, logits: object) -> None:
        if plan.moves:
            raise MemoryError

    model.change = change
    found = answers(engine, [greedy(str(p), p, 3 + 5 * i) for i, p in enumerate(PROMPTS)])
    assert any(plan.moves for plan in model.plans)
    assert found == [stub_answer(p, 3 + 5 * i) for i, p in enumerate(PROMPTS)]


def test_newcomers_wait_until_the_rows_are_fewer_than_the_limit() -> None:
    engine, model = stub_engine()
    model.change = raising_at(9, MemoryError())  # all four rows decode
    answers(engine, [greedy(str(i), [i], 12) for i in range(8)])
    sizes = [plan.num_rows for plan in model.plans[9:]]
    assert sizes[0] == 4
    assert max(sizes[sizes.index(2) :]) == 2
    assert sizes.count(2) > 12


def test_memory_that_does_not_suffice_again_fails_the_steps_requests_only() -> None:
    engine, model = stub_engine(max_batch_size=1)

    def change(plan: StepPlan, logits: object) -> None:
        if plan.decode and plan.decode[0] is failing:
            raise MemoryError

    failing, other = greedy("failing", [1], 5), greedy("other", [2], 5)
    model.change = change
    answers(engine, [failing, other])
    assert failing.finish_reason is FinishReason.ERROR
    assert failing.error == "the model run failed: MemoryError"
    assert other.output_ids == stub_answer([2], 5)


def test_other_failures_are_not_tried_again() -> None:
    engine, model = stub_engine()
    model.change = raising_at(0, RuntimeError("the device is lost"))
    [found] = answers(engine, [greedy("a", [1], 5)])
    assert found == []
    assert engine._scheduler.batch_limit == 4


def test_metric_shows_the_limit_from_the_start() -> None:
    registry = CollectorRegistry()
    engine, model = stub_engine(observer=Metrics(registry).of_engine())

    def shown() -> float | None:
        return registry.get_sample_value("phi_serve_batch_limit")

    assert shown() == 4
    model.change = raising_at(9, MemoryError())
    answers(engine, [greedy(str(p), p, 20) for p in PROMPTS])
    assert shown() == 2
    for i in range(40):
        engine.submit(greedy(str(i), [i], 20))
    run(engine)
    assert shown() == 4


class Breaking:
    """Steps of five rows run to their end, and find no memory then; the first time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tried: list[Sequence] | None = None
        self.limits: set[int] = set()

    def forward(self, plan: StepPlan, cache: KVCache) -> NDArray[np.float32]:
        logits = self._model.forward(plan, cache)
        if plan.decode is self._tried:  # again
            self.limits.add(plan.rows_per_run)
            return logits
        self._tried = plan.decode
        if plan.num_rows == 5:
            logits.fill(np.nan)
            raise RuntimeError("Failed to allocate memory")
        return logits


@pytest.mark.parametrize("form", ["fused", "portable"])
def test_real_cache_is_whole_after_runs_that_broke_behind_their_writes(
    form: str, tiny_llama: TinyModel, bring: Bring
) -> None:
    folder = tiny_llama.folder if form == "fused" else bring(make_portable, tiny_llama.source)
    prompts = [[5 + i] * (3 + 7 * i) for i in range(5)]

    def found(engine: Engine) -> list[list[int]]:
        return answers(engine, [greedy(str(i), p, 30) for i, p in enumerate(prompts)])

    engine = real_engine(folder, max_batch_size=5, prefill_chunk=8)
    expected = found(engine)
    engine = real_engine(folder, max_batch_size=5, prefill_chunk=8)
    engine._model = breaking = Breaking(engine._model)
    assert found(engine) == expected
    assert breaking.limits == {2, 1}
