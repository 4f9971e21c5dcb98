"""Model folders changed on purpose, or made wrong, from a good one that stays as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from quantize import MODEL_FILE
from quantize.data_file import DATA_FILE
from quantize.graph_file import all_tensors
from quantize.hashes import file_table


def copy_of(good: Path, folder: Path, **record: Any) -> Path:
    """A copy of `good`, with `record` added to its quantization.json."""
    shutil.copytree(good, folder, dirs_exist_ok=True)
    if record:
        edit_json(folder / "quantization.json", **record)
    return folder


def copy_edited(good: Path, folder: Path, edit: Callable[[onnx.ModelProto], object]) -> Path:
    """A copy of `good` with its graph edited."""
    shutil.copytree(good, folder, dirs_exist_ok=True)
    edit_graph(folder, edit)
    return folder


def copy_with_hashes(good: Path, folder: Path) -> Path:
    """A copy of `good` whose quantization.json lists its files."""
    shutil.copytree(good, folder)
    edit_json(folder / "quantization.json", files=file_table(folder))
    return folder


def edit_json(path: Path, **fields: Any) -> None:
    """Sets fields; None removes one."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    content |= fields
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def edit_graph(folder: Path, edit: Callable[[onnx.ModelProto], object]) -> None:
    [path] = folder.glob("*.onnx")
    model = onnx.load(path, load_external_data=False)
    edit(model)
    path.write_bytes(model.SerializeToString())


def to_genai_layout(folder: Path, graph_name: str = "phi3-mini-4k-instruct-cpu-int4.onnx") -> Path:
    """As ONNX Runtime GenAI has it: other file names, genai_config.json, nothing of ours."""
    (folder / DATA_FILE).rename(folder / f"{graph_name}.data")
    edit_graph(folder, lambda model: relocate(model, f"{graph_name}.data"))
    (folder / MODEL_FILE).rename(folder / graph_name)
    (folder / "quantization.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    decoder = {
        "filename": graph_name,
        "num_hidden_layers": config["num_hidden_layers"],
        "num_key_value_heads": config["num_key_value_heads"],
        "head_size": config["hidden_size"] // config["num_attention_heads"],
    }
    model = {
        "decoder": decoder,
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "eos_token_id": config["eos_token_id"],
    }
    edit_json(folder / "genai_config.json", model=model)
    return folder


def relocate(model: onnx.ModelProto, location: str) -> None:
    """Names another data file in every tensor that lies outside."""
    for tensor in all_tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location


def weight_of(folder: Path, name: str) -> NDArray[np.float32]:
    """A float weight in the folder's data file, to be written in place."""
    graph = onnx.load(folder / MODEL_FILE, load_external_data=False).graph
    [tensor] = [tensor for tensor in graph.initializer if tensor.name == name]
    place = {entry.key: entry.value for entry in tensor.external_data}
    file, offset = folder / place["location"], int(place["offset"])
    return np.memmap(file, np.float32, "r+", offset, tuple(tensor.dims))


def make_fp16(folder: Path) -> None:
    """Keys, values, logits and weights."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(folder / MODEL_FILE)
    (folder / f"{MODEL_FILE}.data").unlink()
    onnx.save(convert_float_to_float16(model), folder / MODEL_FILE)
