"""A protobuf holds 2 GB at most, so no stage may put weights into one; and none leaves files.

On a tiny model every serialized protobuf is looked at. The wall itself is met by a model of 2.4 GB
of zeros, when asked for.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantize import MODEL_FILE
from quantize.external_data import external_tensors
from quantize.graph_file import all_tensors

from .commands import run_quantize
from .conftest import Build, TinyModel
from .edits import edit_json, truncate
from .live import ROOT
from .tiny_tokenizers import byte_level_tokenizer

INLINE_LIMIT = 1024  # bytes of a tensor; norms and constants of a tiny model are below
NEVER_REFUSED = ["--max-kl", "9", "--min-top1", "0", "--max-perplexity-ratio", "9"]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process and those that it starts put their temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def inlined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For every model that is serialized from now on, bytes of the largest tensor inside."""
    found: list[int] = []
    serialize = onnx.ModelProto.SerializeToString

    def recording(model: onnx.ModelProto, **options: bool) -> bytes:
        found.append(max((tensor.ByteSize() for tensor in all_tensors(model)), default=0))
        return serialize(model, **options)

    monkeypatch.setattr(onnx.ModelProto, "SerializeToString", recording)
    return found


def test_recorder_sees_weights_that_are_saved_inside(
    tiny_llama: TinyModel, inlined: list[int], tmp_path: Path
) -> None:
    onnx.save(onnx.load(tiny_llama.folder / MODEL_FILE), tmp_path / "whole.onnx")
    assert max(inlined) > 4 * 64 * 160


def test_no_stage_puts_weights_into_a_protobuf_and_nothing_is_left(
    tiny_llama: TinyModel, inlined: list[int], scratch: Path, build_folder: Build
) -> None:
    output = build_folder(tiny_llama.source, "int8")
    assert len(inlined) >= 2  # the builder's and ours
    assert max(inlined) <= INLINE_LIMIT
    graph = onnx.load(output / MODEL_FILE, load_external_data=False)
    assert len(external_tensors(graph)) > 2 * 5  # the matrices of both layers, at least
    assert list(scratch.iterdir()) == []


def test_refused_model_leaves_nothing_in_the_temporary_folder(
    tiny_llama: TinyModel, scratch: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_llama.source, tmp_path / "source")
    edit_json(source / "config.json", max_position_embeddings=16)  # a short gate
    output = tmp_path / "out" / "int8"
    arguments = [str(source), "--output", str(output), "--precision", "int8"]
    result = run_quantize(*arguments, "--max-perplexity-ratio", "0")
    assert result.exit_code == 2, result.output
    assert "not published" in result.stderr
    assert list(scratch.iterdir()) == []
    assert {path.name for path in output.parent.iterdir()} == {".cache"}


def test_weights_cut_short_leave_nothing_in_the_temporary_folder(
    tiny_llama: TinyModel, scratch: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_llama.source, tmp_path / "source")
    truncate(source / "model.safetensors")
    output = tmp_path / "out" / "int8"
    result = run_quantize(str(source), "--output", str(output), "--precision", "int8")
    assert result.exit_code != 0
    assert list(scratch.iterdir()) == []
    assert {path.name for path in output.parent.iterdir()} == {".cache"}


def make_zeros(folder: Path) -> Path:
    """A Llama of 2.4 GB whose weights are a hole in a file."""
    config = LlamaConfig(
        vocab_size=331,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        weights = LlamaForCausalLM(config).state_dict()
    weights.pop("lm_head.weight")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        start, end = end, end + 4 * weight.numel()
        header[name] = {"dtype": "F32", "shape": [*weight.shape], "data_offsets": [start, end]}
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + end)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    "BIG_MODEL_TESTS" not in os.environ,
    reason="takes minutes, 6 GB of memory and 6 GB of disk; BIG_MODEL_TESTS=1 runs it",
)
def test_model_beyond_the_wall_is_built_and_checked_in_bounded_memory(tmp_path: Path) -> None:
    source = make_zeros(tmp_path / "source")
    size = (source / "model.safetensors").stat().st_size
    assert size > 2**31
    output = tmp_path / "int8"
    build = [str(source), "--output", str(output), "--precision", "int8", *NEVER_REFUSED]
    for arguments in (build, ["check", str(output)]):
        command = [sys.executable, "-m", "quantize", *arguments]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-2000:] + result.stdout[-2000:]
    peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"peak {peak / 1e9:.1f} GB for {size / 1e9:.1f} GB of weights: {peak / size:.2f} times")
    assert peak < 2.5 * size
