"""Every family of decoder models that is offered: the fused graph against transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from app.graph import read_graph
from app.kv_cache import KVCache
from app.model import OnnxModel
from app.sequence import PrefillChunk, StepPlan
from quantize import MODEL_FILE
from quantize.export import export_fused, read_config
from quantize.families import FUSED
from quantize.rotary import context_length

from .conftest import Named
from .engines import greedy
from .logits import LENGTHS, TOLERANCE, ids_of_length, prefill
from .tiny import CONTEXT, TorchReference
from .tiny_families import FAMILIES, ORIGINAL, make_family

LONGEST = 44


@dataclass(frozen=True)
class Exported:
    source: Path
    folder: Path
    model: OnnxModel
    ids: list[int]  # as many as are tried
    expected: torch.Tensor  # (len(ids), vocab): the logits of transformers at every position

    def cache(self, num_rows: int = 1) -> KVCache:
        return KVCache(self.model.spec.kv, num_rows, self.model.context_length, self.model.device)


def export(name: str, root: Path, dtype: Literal["fp32", "fp16"]) -> Exported:
    source = make_family(name, root / "source")
    folder = root / "folder"
    folder.mkdir()
    export_fused(source, folder, lambda line: None, dtype)
    return load(source, folder)


def load(source: Path, folder: Path) -> Exported:
    context = context_length(read_config(source))
    session = ort.InferenceSession(folder / MODEL_FILE)
    model = OnnxModel(session, read_graph(folder), context)
    ids = ids_of_length(min(LONGEST, context))
    return Exported(source, folder, model, ids, TorchReference(source).logits(ids))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, family_source: Named, family_graph: Named) -> Exported:
    return load(family_source(request.param), family_graph(request.param))


def prefill_logits(family: Exported, length: int) -> np.ndarray:
    ids = family.ids[:length]
    chunk = PrefillChunk(greedy("one", ids), 0, 0, ids)
    return family.model.forward(StepPlan([], chunk, []), family.cache())[0].copy()


def test_prompts_give_the_logits_of_transformers(family: Exported) -> None:
    """Lengths of both sides of every window (12 and 20), and of a longrope model's end."""
    for length in {*LENGTHS, 11, 12, 13, 14, 19, 20, 21, 22, 24, 31, 32, 40}:
        if length <= len(family.ids):
            found = prefill_logits(family, length)
            np.testing.assert_allclose(
                found, family.expected[length - 1], atol=TOLERANCE, err_msg=f"at length {length}"
            )


def test_every_step_gives_the_logits_of_transformers(family: Exported) -> None:
    """Single tokens cross every window."""
    cache, ids = family.cache(), family.ids
    sequence = prefill(family.model, cache, 0, ids[:9], chunk=4)
    for length in range(10, len(ids) + 1):
        sequence.output_ids[-1] = ids[length - 1]
        logits = family.model.forward(StepPlan([], None, [sequence]), cache)[0]
        np.testing.assert_allclose(
            logits, family.expected[length - 1], atol=TOLERANCE, err_msg=f"at length {length}"
        )
        sequence.num_cached += 1


@pytest.mark.parametrize("chunk", [7, 16])
def test_chunks_that_cross_a_window_leave_the_cache_of_transformers(
    family: Exported, chunk: int
) -> None:
    for length in (13, 22, 31):
        cache = family.cache()
        sequence = prefill(family.model, cache, 0, family.ids[:length], chunk)
        assert sequence.last_token == int(family.expected[length - 1].argmax())
        sequence.output_ids[-1] = family.ids[length]
        logits = family.model.forward(StepPlan([], None, [sequence]), cache)[0]
        np.testing.assert_allclose(logits, family.expected[length], atol=TOLERANCE)


def test_rows_on_both_sides_of_a_window_share_a_step(family: Exported) -> None:
    lengths = [30, 1, 12, 7, 20]
    cache = family.cache(len(lengths))
    rows = []
    for row, length in enumerate(lengths):
        rows.append(prefill(family.model, cache, row, family.ids[:length]))
        rows[-1].output_ids[-1] = family.ids[length]
    logits = family.model.forward(StepPlan([], None, rows), cache)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row], family.expected[length], atol=TOLERANCE)


def test_every_architecture_that_is_offered_is_tried_here() -> None:
    tried = {type(make()).__name__ for make in FAMILIES.values()}
    assert tried == set(FUSED)


def windows(folder: Path) -> list[int]:
    graph = onnx.load(folder / MODEL_FILE, load_external_data=False).graph
    nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    return [a.i for node in nodes for a in node.attribute if a.name == "local_window_size"]


def test_each_layer_has_its_own_window(family_graph: Named) -> None:
    """Gemma 2's first layer has one, its second has none: the builder has it the other way."""
    assert windows(family_graph("gemma2")) == [12, -1]


@pytest.mark.parametrize("name", ["phi3.5-128k", "gemma2"])
def test_fp16_graph_runs_on_the_cpu_close_to_fp32(name: str, tmp_path: Path) -> None:
    family = export(name, tmp_path, "fp16")
    assert family.model.spec.kv.dtype == family.model.spec.logits_dtype == torch.float16
    for length in (1, 7, 30):
        found = prefill_logits(family, length)
        np.testing.assert_allclose(found, family.expected[length - 1], atol=0.05)


@pytest.mark.parametrize("name", ["phi3.5-128k", "phi4-mini"])
def test_longrope_graph_ends_where_its_factors_end(
    name: str, family_source: Named, family_graph: Named
) -> None:
    """And holds no cache of the long side: 50 MB for Phi-3."""
    family = load(family_source(name), family_graph(name))
    graph = onnx.load(family.folder / MODEL_FILE, load_external_data=False).graph
    caches = {i.name: list(i.dims)[0] for i in graph.initializer if "_cache" in i.name}
    assert caches == {"cos_cache": ORIGINAL, "sin_cache": ORIGINAL}
    assert not [node.name for node in graph.node if node.op_type == "If"]
    ids = ids_of_length(ORIGINAL + 1)
    chunk = PrefillChunk(greedy("one", ids), 0, 0, ids)
    cache = KVCache(family.model.spec.kv, 1, CONTEXT, family.model.device)
    with pytest.raises(Exception, match="cos_cache"):
        family.model.forward(StepPlan([], chunk, []), cache)
