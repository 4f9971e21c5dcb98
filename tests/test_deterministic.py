"""DETERMINISTIC: an answer is the same, bit by bit, alone and in company that comes and goes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from app.engine import Engine, Model
from app.kv_cache import KVCache
from app.model import OnnxModel
from app.sequence import FinishReason, SamplingParams, Sequence, StepPlan

from .conftest import Bring, Build, TinyModel
from .engines import greedy, loaded_service, real_engine, run
from .folders import make_portable
from .live import ROOT
from .logits import cache_for, ids_of_length, prefill

PROBE = ids_of_length(21)  # with chunks of 16, it is read in two
NUM_TOKENS = 8
KINDS = {
    "greedy": SamplingParams(NUM_TOKENS),
    "seeded": SamplingParams(NUM_TOKENS, temperature=1.0, seed=11),
}
Said = tuple[list[int], NDArray[np.float32]]  # ids; logits (tokens, vocab)


class Listener:
    """A model that keeps the logits of one sequence."""

    def __init__(self, model: Model, watched: Sequence) -> None:
        self._model = model
        self._watched = watched
        self.logits: list[NDArray[np.float32]] = []
        self.num_rows: set[int] = set()

    def forward(self, plan: StepPlan, cache: KVCache) -> NDArray[np.float32]:
        logits = self._model.forward(plan, cache)
        if self._watched in plan.sampled:
            self.logits.append(logits[plan.sampled.index(self._watched)].copy())
            self.num_rows.add(len(plan.sampled))
        return logits


def ask(engine: Engine, params: SamplingParams, num_fillers: int, seed: int = 0) -> Said:
    """The probe, beside fillers of which up to `num_fillers` run at a time."""
    rng = random.Random(seed)
    probe = Sequence("probe", list(PROBE), params)
    model, engine._model = engine._model, Listener(engine._model, probe)
    fillers: list[Sequence] = []
    starts_at = rng.randint(0, num_fillers)
    for step in range(1000):
        if step == starts_at:
            engine.submit(probe)
        fillers = [filler for filler in fillers if not filler.is_finished]
        if len(fillers) < num_fillers and rng.random() < 0.8:
            prompt = ids_of_length(rng.randint(1, 60), seed=step)
            fillers.append(greedy("filler", prompt, rng.randint(2, 20)))
            engine.submit(fillers[-1])
        engine.step()
        if probe.is_finished:
            break
    for filler in fillers:
        filler.ended_by = FinishReason.ABORT
    run(engine)
    heard, engine._model = engine._model, model
    assert len(probe.output_ids) == NUM_TOKENS
    assert num_fillers == 0 or len(heard.num_rows) > 1  # there was company, and it changed
    return probe.output_ids, np.stack(heard.logits)


def check_alone_and_in_company(
    engine: Engine, params: SamplingParams, company: Iterable[int] = (0, 0, 0, 0, 1, 4, 15)
) -> None:
    """`company` are others, at the most: they come and go."""
    ids, logits = ask(engine, params, num_fillers=0)
    for num_fillers in company:
        found_ids, found_logits = ask(engine, params, num_fillers, seed=num_fillers)
        assert found_ids == ids, f"beside {num_fillers}"
        np.testing.assert_array_equal(found_logits, logits, f"beside {num_fillers}")


@pytest.fixture(scope="module")
def engine_of(tiny_llama: TinyModel, built: Build, bring: Bring) -> Callable[[str], Engine]:
    folders: dict[str, Callable[[], Path]] = {
        "fused fp32": lambda: tiny_llama.folder,
        "fused int8": lambda: built(tiny_llama.source, "int8"),
        "portable fp32": lambda: bring(make_portable, tiny_llama.source),
    }
    return lambda form: real_engine(folders[form](), max_batch_size=16, deterministic=True)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("fused fp32", "greedy"),
        ("fused fp32", "seeded"),
        ("fused int8", "greedy"),
        ("portable fp32", "greedy"),
    ],
)
def test_answer_is_the_same_alone_and_beside_1_to_15_others(
    engine_of: Callable[[str], Engine], form: str, kind: str
) -> None:
    check_alone_and_in_company(engine_of(form), KINDS[kind])


def test_without_the_setting_logits_of_a_portable_graph_change_with_the_neighbours(
    tiny_llama: TinyModel, bring: Bring
) -> None:
    """Its rows are padded to the longest: a softmax over more columns rounds otherwise."""
    engine = real_engine(bring(make_portable, tiny_llama.source), max_batch_size=16)
    _, alone = ask(engine, KINDS["greedy"], num_fillers=0)
    others = [ask(engine, KINDS["greedy"], n, seed=n)[1] for n in (4, 15)]
    assert any(not np.array_equal(found, alone) for found in others)
    for found in others:
        np.testing.assert_allclose(found, alone, atol=1e-4)  # the last bits only


def test_every_row_decodes_in_a_run_of_its_own(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OnnxModel.load(tiny_llama.folder, "cpu", num_threads=1)
    cache = cache_for(model)
    rows = [prefill(model, cache, row, ids_of_length(n)) for row, n in enumerate([33, 1, 7])]
    shapes: list[tuple[int, tuple[int, ...], int]] = []  # first row, ids, longest row
    whole_run = model._form.run
    monkeypatch.setattr(
        model._form,
        "run",
        lambda cache, run: (
            shapes.append((run.first_row, run.ids.shape, run.max_length)),
            whole_run(cache, run),
        ),
    )
    together = model.forward(StepPlan([], None, rows), cache).copy()
    model.deterministic = True
    apart = model.forward(StepPlan([], None, rows), cache)
    assert shapes == [(0, (3, 1), 33), (0, (1, 1), 33), (1, (1, 1), 1), (2, (1, 1), 7)]
    np.testing.assert_allclose(apart, together, atol=1e-4)


@pytest.mark.parametrize(("arguments", "expected"), [([], False), (["--deterministic"], True)])
def test_info_says_whether_it_is_on(
    tiny_llama: TinyModel, arguments: list[str], expected: bool
) -> None:
    service = loaded_service(tiny_llama.folder, *arguments)
    assert service.current.loaded is not None
    info = service.current.loaded.info
    assert info["deterministic"] is expected
    assert info["prefill_stall"] == (0 if expected else 1.0)  # chunks by the clock would differ


@pytest.mark.slow
def test_default_model_says_the_same_alone_and_beside_1_to_15_others() -> None:
    engine = real_engine(ROOT / "models" / "default", max_batch_size=16, deterministic=True)
    check_alone_and_in_company(engine, KINDS["seeded"], (0, 1, 15))


@pytest.mark.slow
def test_script_reports_divergence_and_speed(tiny_llama: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "divergence.json"
    sizes = ["--probes", "2", "--tokens", "4", "--alone", "2", "--speed-steps", "2"]
    script = str(ROOT / "scripts" / "measure_divergence.py")
    command = [sys.executable, script, str(tiny_llama.folder), *sizes, "--repeats", "1"]
    done = subprocess.run(
        [*command, "--threads", "1", "--json", str(file)],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == report
    [folder] = report["folders"]
    for kind in ("greedy", "seeded"):
        assert list(folder[kind]) == ["alone", "default", "deterministic"]
        assert folder[kind]["alone"]["mean_rows"] < 1 < folder[kind]["default"]["mean_rows"]
        found = folder[kind]["deterministic"]
        assert (found["answers"], found["differ"], found["same_bits"]) == (2, 0, 2)
        assert found["mean_rows"] == folder[kind]["default"]["mean_rows"]  # the same company
    assert [(row["rows"], row["setting"]) for row in folder["speed"]] == [
        (rows, setting) for rows in (1, 8, 32) for setting in ("default", "deterministic")
    ]
    assert min(row["tokens_per_second"] for row in folder["speed"]) > 0
