"""The runner for CUDA, as far as it runs on a CPU: the same logits, and memory given back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import numpy as np
import onnxruntime as ort
import pytest
import torch

from app.model import OnnxModel
from app.runner import CudaRunner, Runner, run_options, runner_of
from app.sequence import StepPlan

from .conftest import TinyModel
from .logits import cache_for, ids_of_length, prefill

CPU = torch.device("cpu")


class Session:
    """Records the options of each run, and passes it on."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self.shrunk: list[str] = []
        self.waited: list[bool] = []

    def run_with_iobinding(
        self, binding: ort.IOBinding, options: ort.RunOptions | None = None
    ) -> None:
        options = options or ort.RunOptions()
        self._session.run_with_iobinding(binding, options)
        self.shrunk.append(entry(options, "memory.enable_memory_arena_shrinkage"))
        self.waited.append(entry(options, "disable_synchronize_execution_providers") != "1")


def entry(options: ort.RunOptions, key: str) -> str:
    try:
        return str(options.get_run_config_entry(key))
    except RuntimeError:  # it was never set
        return ""


@pytest.fixture
def model(tiny_llama: TinyModel) -> OnnxModel:
    return OnnxModel.load(tiny_llama.folder, "cpu", num_threads=1)


def with_runner(model: OnnxModel, instants: Iterator[float]) -> tuple[CudaRunner, Session]:
    """`model` runs as on CUDA from now on."""
    session = Session(model._form._session)
    runner = CudaRunner(session, CPU, instants.__next__)  # type: ignore[arg-type]
    model._form._runner = runner
    return runner, session


def decode(model: OnnxModel) -> np.ndarray:
    """Two rows, of which one's prompt is read in two chunks."""
    cache = cache_for(model)
    rows = [prefill(model, cache, 0, ids_of_length(9)), prefill(model, cache, 1, [5], chunk=4)]
    return model.forward(StepPlan([], None, rows), cache)


def test_device_has_its_runner(model: OnnxModel) -> None:
    session = model._form._session
    assert type(runner_of(session, CPU)) is Runner
    assert type(runner_of(session, torch.device("cuda"))) is CudaRunner


def test_inputs_fed_as_tensors_give_the_same_logits(model: OnnxModel) -> None:
    expected = decode(model).copy()
    _, session = with_runner(model, repeat(0.0))
    np.testing.assert_array_equal(decode(model), expected)
    assert session.waited == [False] * 3
    assert session.shrunk == [""] * 3


def test_mask_made_on_the_device_is_that_of_the_host(model: OnnxModel) -> None:
    runner, _ = with_runner(model, repeat(0.0))
    ends = np.array([[3], [0], [5]])
    expected = runner_of(model._form._session, CPU).ones_below(ends, 5)
    found = runner.ones_below(ends, 5)
    assert isinstance(found, torch.Tensor) and found.dtype == torch.int64
    np.testing.assert_array_equal(found.numpy(), expected)


def test_first_run_after_a_rest_gives_memory_back_and_waits(model: OnnxModel) -> None:
    _, session = with_runner(model, iter([0.0, 1.0, 19.0, 39.0, 40.0]))
    cache = cache_for(model)
    rows = [prefill(model, cache, 0, ids_of_length(9))]
    for _ in range(3):
        model.forward(StepPlan([], None, rows), cache)
    assert session.shrunk == ["", "", "cpu:0", ""]
    assert session.waited == [False, False, True, False]


def test_arena_that_is_not_known_costs_no_run(
    model: OnnxModel, caplog: pytest.LogCaptureFixture
) -> None:
    expected = decode(model).copy()
    runner, session = with_runner(model, iter([0.0, *(100.0 * n for n in range(1, 9))]))
    runner._shrinking = run_options(shrinks="gpu:0")  # of a session on the CPU
    np.testing.assert_array_equal(decode(model), expected)
    assert session.shrunk == [""] * 3
    assert "memory is not given back" in caplog.text
    assert len(caplog.records) == 1
