"""From source to folder: what is refused, what is written. Logits are compared in test_model."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantize.export import export_fused
from quantize.record import tool_versions

from .commands import run_quantize
from .edits import edit_json
from .tiny import make_llama


def test_command_builds_a_whole_folder_and_nothing_else(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source")
    output = tmp_path / "out" / "tiny"
    result = run_quantize(str(source), "--output", str(output), "--precision", "int8")
    assert result.exit_code == 0, result.output
    names = {path.name for path in output.iterdir()}
    assert names >= {"model.onnx", "model.onnx.data", "config.json", "generation_config.json"}
    assert names >= {"tokenizer.json", "chat_template.jinja", "quantization.json"}
    assert {path.name for path in output.parent.iterdir()} == {"tiny", ".cache"}
    record = json.loads((output / "quantization.json").read_text())
    assert (record["name"], record["precision"]) == ("source", "int8")
    assert (record["form"], record["device"]) == ("fused", "cpu")
    assert record["quantization"]["matrices"] == 2 * 5 + 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "nope"}, "nope"),
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM"),
        ({"vocab_size": 160}, "LM head"),  # as wide as the intermediate layer
        ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [2]}}, "mrope"),
        ({"head_dim": 8}, "multiple of 16"),
        ({"hidden_act": "quick_gelu"}, "quick_gelu"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized already"),
    ],
    ids=[
        "unknown model type",
        "unknown architecture",
        "ambiguous LM head",
        "unknown rotary embedding",
        "rotary embedding that the kernel does not take",
        "unknown activation",
        "config of transformers 5",
        "quantized weights",
    ],
)
def test_model_that_would_come_out_wrong_is_refused_and_leaves_nothing(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    source = make_llama(tmp_path / "source")
    edit_json(source / "config.json", **fields)
    output = tmp_path / "out" / "tiny"
    result = run_quantize(str(source), "--output", str(output))
    assert result.exit_code == 2
    assert says in result.stderr
    assert {path.name for path in output.parent.iterdir()} == {".cache"}


def test_damaged_weights_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source")
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    result = run_quantize(str(source), "--output", str(tmp_path / "tiny"))
    assert result.exit_code == 2
    assert "model.safetensors is not whole" in result.stderr
    assert not (tmp_path / "tiny").exists()


def test_weight_that_is_missing_is_named(tmp_path: Path) -> None:
    """transformers would fill it with random numbers."""
    source = make_llama(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    result = run_quantize(str(source), "--output", str(tmp_path / "tiny"))
    assert result.exit_code == 2
    assert "model.layers.1.mlp.up_proj.weight" in result.stderr
    assert not (tmp_path / "tiny").exists()


def test_generation_config_is_taken_as_it_is(tmp_path: Path) -> None:
    """transformers refuses to save this one: a temperature without sampling."""
    source = make_llama(tmp_path / "source")
    written = '{"temperature": 0.5, "do_sample": false, "eos_token_id": [1, 262]}'
    (source / "generation_config.json").write_text(written)
    output = tmp_path / "tiny"
    result = run_quantize(str(source), "--output", str(output), "--precision", "fp32")
    assert result.exit_code == 0, result.output
    assert (output / "generation_config.json").read_text() == written


def test_stages_are_told_while_they_run(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source")
    (tmp_path / "folder").mkdir()
    lines: list[str] = []
    export_fused(source, tmp_path / "folder", lines.append)
    layers = [line for line in lines if line.startswith("Reading layer")]
    assert layers == ["Reading layer 0", "Reading layer 1"]


def test_record_names_the_runtime_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU wheel is another distribution of the same package."""
    installed = [
        SimpleNamespace(metadata={"Name": name}, version="1.26.0")
        for name in ("onnxruntime-gpu", "somebody-elses")
    ]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    assert tool_versions() == {"onnxruntime-gpu": "1.26.0"}
