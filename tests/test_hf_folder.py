"""A Hugging Face folder that lacks a part, or has half of one, is refused naming it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quantize.checkpoint import INDEX
from quantize.errors import QuantizeError
from quantize.hf_folder import check_folder
from quantize.onnx_source import find_graph

from .conftest import TinyModel
from .tiny import make_phi3

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tiny_llama: TinyModel, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_llama.source, tmp_path / "model")


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same weights in two files and an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(QuantizeError) as raised:
        check_folder(folder)
    return str(raised.value)


def cut(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])


def test_parameters_are_counted_from_the_headers(folder: Path, sharded: Path) -> None:
    form, size = check_folder(sharded)
    tensors = [load_file(sharded / name) for name in ("a.safetensors", "b.safetensors")]
    assert size.num_parameters == sum(t.numel() for part in tensors for t in part.values())
    assert (form, size.num_embedded) == ("fused", 331 * 64)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.json", "is no Hugging Face folder: config.json is missing"),
        (WEIGHTS, "holds no .safetensors weights"),
        ("tokenizer.json", "tokenizer.json is missing"),
    ],
)
def test_missing_file_is_named(name: str, says: str, folder: Path) -> None:
    (folder / name).unlink()
    message = refusal(folder)
    assert says in message
    assert str(folder) in message


@pytest.mark.parametrize("num_bytes", [0, 5, 100, -1])
def test_weights_that_are_cut_off_are_named(num_bytes: int, folder: Path) -> None:
    cut(folder / WEIGHTS, num_bytes)
    assert str(folder / WEIGHTS) in refusal(folder)


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "b.safetensors").unlink()
    assert f"lacks 1 of the 2 files that {INDEX} names: b.safetensors" in refusal(sharded)


def test_shard_that_is_cut_off_is_named(sharded: Path) -> None:
    cut(sharded / "b.safetensors", -10)
    assert "b.safetensors is not whole" in refusal(sharded)


def test_shard_that_lacks_a_tensor_is_named(sharded: Path) -> None:
    shutil.copyfile(sharded / "a.safetensors", sharded / "b.safetensors")
    assert "b.safetensors lacks model." in refusal(sharded)


def test_index_that_leads_outside_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../b.safetensors")
    (sharded / INDEX).write_text(json.dumps(index))
    assert "outside the folder" in refusal(sharded)


def test_pickled_weights_are_refused_with_the_reason(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "only pytorch_model.bin" in message
    assert "can run code" in message


def test_config_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(folder)


def test_spoiled_tokenizer_is_found_before_the_export(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert f"the tokenizer in {folder} cannot be used" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "library"),
    [(b"\n\x0e\n\x05<unk>\x15\x00\x00", "sentencepiece"), (b"IQ== 0\nIg== 1\n", "tiktoken")],
)
def test_tokenizer_that_needs_another_library_names_it(
    content: bytes, library: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # wherever the tests run
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(content)
    assert f"{library} is needed, which is not installed" in refusal(folder)


def test_code_of_a_known_architecture_is_left_alone(tmp_path: Path) -> None:
    """Phi-3's own config.json names Python files, which must neither be run nor be missed."""
    folder = make_phi3(tmp_path / "phi3")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("configuration_phi3.py", "modeling_phi3.py"):
        (folder / name).write_text("raise SystemExit('code of a model was run')")
    assert check_folder(folder)[0] == "fused"
    assert find_graph(folder) is None
