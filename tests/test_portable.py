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
from onnx.external_data_helper import uses_external_data
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quantize import MODEL_FILE, portable
from quantize.errors import QuantizeError
from quantize.portable import export_portable

from .conftest import Build
from .tiny import TorchReference
from .tiny_tokenizers import byte_level_tokenizer

_SHAPE: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_neox": {**_SHAPE, "intermediate_size": 160, "initializer_range": 0.15},
    "gpt2": {"vocab_size": 331, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.15},
    "opt": {**_SHAPE, "ffn_dim": 160, "word_embed_proj_dim": 64, "init_std": 0.15},
    "stablelm": {**_SHAPE, "num_key_value_heads": 2, "initializer_range": 0.15},
}
LENGTHS = (1, 7, 33)


def make(model_type: str, folder: Path) -> Path:
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **SHAPES[model_type])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


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


@pytest.fixture(scope="module", params=sorted(SHAPES))
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Source and folder of the graph."""
    root = tmp_path_factory.mktemp(request.param)
    source, folder = make(request.param, root / "source"), root / "folder"
    folder.mkdir()
    export_portable(source, folder, lambda line: None)
    return source, folder


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
    assert any(uses_external_data(tensor) for tensor in graph.initializer)


def test_weight_that_is_missing_is_named(tmp_path: Path) -> None:
    """transformers would fill it with random numbers."""
    source = make("gpt_neox", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    del weights["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantizeError, match="lacks 1 .*layers.1.mlp.dense_h_to_4h.weight among"):
        export_portable(source, tmp_path, lambda line: None)


def test_checkpoint_without_the_prefix_of_the_model_is_whole(tmp_path: Path) -> None:
    """As GPT-2 was published; its tied LM head is not in it."""
    source = make("gpt2", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file(bare, source / "model.safetensors", {"format": "pt"})
    assert portable._load(source).config.model_type == "gpt2"


def test_command_writes_the_form_of_the_graph(build_folder: Build, tmp_path: Path) -> None:
    folder = build_folder(make("opt", tmp_path / "source"), "fp32")
    assert json.loads((folder / "quantization.json").read_text())["form"] == "portable"


def test_graph_that_differs_from_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that changes between the comparison's torch side and the trace."""
    source, folder = make("gpt_neox", tmp_path / "source"), tmp_path / "folder"
    folder.mkdir()
    trace = portable._trace

    def spoiled(model: Any, target: Path) -> None:
        with torch.no_grad():
            model.gpt_neox.layers[1].mlp.dense_h_to_4h.weight.mul_(1.05)
        trace(model, target)

    monkeypatch.setattr(portable, "_trace", spoiled)
    with pytest.raises(QuantizeError, match="differs from torch by"):
        export_portable(source, folder, lambda line: None)
