"""The builder reads weights where they lie: the same graph, without an fp32 model in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from quantize import MODEL_FILE
from quantize.export import export_fused
from quantize.forms import Dtype
from quantize.mapped_weights import convert_later, find_stored_half
from scripts.make_random_model import PHI3_TINY, make_model

from .tiny_tokenizers import byte_level_tokenizer

_SHAPE: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def make_phi3(folder: Path) -> None:
    make_model(folder, PHI3_TINY)


def make_gemma(folder: Path) -> None:
    """Its builder adds one to every norm weight: in 16 bits that would round."""
    save_random(GemmaForCausalLM(GemmaConfig(**_SHAPE)).to(torch.bfloat16), folder)


def make_qwen2(folder: Path) -> None:
    """Its queries, keys and values have biases, which the builder joins."""
    save_random(Qwen2ForCausalLM(Qwen2Config(**_SHAPE)).to(torch.float16), folder)


def save_random(model: PreTrainedModel, folder: Path) -> None:
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)


def make_mixed(folder: Path) -> None:
    """One weight is fp32 among others in bfloat16: read as bfloat16 it would be rounded."""
    make_model(folder, PHI3_TINY)
    [path] = folder.glob("*.safetensors")
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"].float() + 1e-6
    save_file(weights, path, {"format": "pt"})


def export(source: Path, folder: Path, dtype: Dtype) -> dict[str, bytes]:
    folder.mkdir()
    export_fused(source, folder, lambda _: None, dtype)
    return {name: (folder / name).read_bytes() for name in (MODEL_FILE, f"{MODEL_FILE}.data")}


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (make_phi3, "fp32"),
        (make_phi3, "fp16"),
        (make_gemma, "fp32"),
        (make_qwen2, "fp32"),
        (make_mixed, "fp32"),
    ],
)
def test_graph_is_the_one_that_the_builder_writes_alone(
    make: Callable[[Path], None], dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source := tmp_path / "source").mkdir()
    make(source)
    ours = export(source, tmp_path / "ours", dtype)
    monkeypatch.setattr("quantize.export.mapped_weights", lambda _: nullcontext())
    assert ours == export(source, tmp_path / "alone", dtype)


def test_weights_stay_in_their_file_while_the_graph_is_built_and_are_let_go(tmp_path: Path) -> None:
    def is_mapped() -> bool:
        return str(source) in Path("/proc/self/maps").read_text()

    (source := tmp_path / "source").mkdir()
    make_phi3(source)
    (tmp_path / "folder").mkdir()
    mapped_at: dict[str, bool] = {}
    export_fused(source, tmp_path / "folder", lambda line: mapped_at.update({line: is_mapped()}))
    [while_saving] = [
        mapped for line, mapped in mapped_at.items() if line.startswith("Saving ONNX")
    ]
    assert (while_saving, is_mapped()) == (True, False)


def test_converted_tensor_lives_no_longer_than_its_use() -> None:
    stored = torch.ones(2, 3, dtype=torch.bfloat16)
    lazy = convert_later(stored, "weight", ir.DataType.FLOAT)
    converted = lazy.raw()
    assert converted.dtype == ir.DataType.FLOAT
    tensor = weakref.ref(converted.raw)
    del converted
    gc.collect()
    assert tensor() is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_stored_type_is_read_off_the_files(dtype: str, tmp_path: Path) -> None:
    make_model(tmp_path, PHI3_TINY, dtype)
    halves = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    assert find_stored_half(tmp_path) == halves.get(dtype)
