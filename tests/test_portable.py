"""Portable graphs say what torch says, and one that does not is refused (FR01, FR06)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from quantize import MODEL_FILE, portable
from quantize.errors import QuantizeError
from quantize.external_data import is_external
from quantize.portable import export_portable

from .conftest import Build, Named
from .tiny import TorchReference
from .tiny_families import PORTABLE_SHAPES, make_family

LENGTHS = (1, 7, 33)


def run(
    session: ort.InferenceSession, ids: list[int], past: dict[str, Any]
) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """One row: logits of all of `ids`, and the cache with them."""
    shapes = {n.name: n.shape for n in session.get_inputs() if n.name.startswith("past")}
    past = past or {n: np.zeros((1, s[1], 0, s[3]), np.float32) for n, s in shapes.items()}
    total = next(iter(past.values())).shape[2] + len(ids)
    inputs = {
        "input_ids": np.array([ids], np.int64),
        "attention_mask": np.ones((1, total), np.int64),
        "position_ids": np.arange(total - len(ids), total)[None],
    }
    names = [name.replace("past_key_values", "present") for name in shapes]
    logits, *present = session.run(["logits", *names], {**inputs, **past})
    return logits[0], dict(zip(shapes, present, strict=True))


@pytest.fixture(scope="module", params=sorted(PORTABLE_SHAPES))
def exported(
    request: pytest.FixtureRequest, family_source: Named, family_graph: Named
) -> tuple[Path, Path]:
    """Source and folder of the graph."""
    return family_source(request.param), family_graph(request.param)


def test_logits_are_those_of_torch_with_and_without_past(exported: tuple[Path, Path]) -> None:
    source, folder = exported
    reference = TorchReference(source)
    session = ort.InferenceSession(folder / MODEL_FILE, providers=["CPUExecutionProvider"])
    for length in LENGTHS:
        ids = np.random.default_rng(length).integers(0, 331, length + 3).tolist()
        expected = reference.logits(ids).numpy()
        whole, past = run(session, ids[:length], {})
        np.testing.assert_allclose(whole, expected[:length], atol=2e-4)
        rest, _ = run(session, ids[length:], past)
        np.testing.assert_allclose(rest, expected[length:], atol=2e-4)


def test_weights_lie_in_one_file_beside_the_graph(exported: tuple[Path, Path]) -> None:
    folder = exported[1]
    assert {path.name for path in folder.iterdir()} == {MODEL_FILE, f"{MODEL_FILE}.data"}
    graph = onnx.load(folder / MODEL_FILE, load_external_data=False).graph
    assert not [t.name for t in graph.initializer if t.ByteSize() > 2000]
    assert any(is_external(tensor) for tensor in graph.initializer)


def test_weight_that_is_missing_is_named(tmp_path: Path) -> None:
    """transformers would fill it with random numbers."""
    source = make_family("gpt_neox", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    del weights["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantizeError, match="lacks 1 .*layers.1.mlp.dense_h_to_4h.weight among"):
        export_portable(source, tmp_path, lambda line: None)


def test_checkpoint_without_the_prefix_of_the_model_is_whole(tmp_path: Path) -> None:
    """As GPT-2 was published; its tied LM head is not in it."""
    source = make_family("gpt2", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file(bare, source / "model.safetensors", {"format": "pt"})
    assert portable._load(source).config.model_type == "gpt2"


def test_command_writes_the_form_of_the_graph(build_folder: Build, family_source: Named) -> None:
    folder = build_folder(family_source("opt"), "fp32")
    assert json.loads((folder / "quantization.json").read_text())["form"] == "portable"


def test_graph_that_differs_from_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that changes between the comparison's torch side and the trace."""
    source, folder = make_family("gpt_neox", tmp_path / "source"), tmp_path / "folder"
    folder.mkdir()
    trace = portable._trace

    def spoiled(model: Any, target: Path) -> None:
        with torch.no_grad():
            model.gpt_neox.layers[1].mlp.dense_h_to_4h.weight.mul_(1.05)
        trace(model, target)

    monkeypatch.setattr(portable, "_trace", spoiled)
    with pytest.raises(QuantizeError, match="differs from torch by"):
        export_portable(source, folder, lambda line: None)
