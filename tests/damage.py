"""Model folders made wrong on purpose, from a good one that stays as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from quantize import MODEL_FILE
from quantize.external_data import all_tensors
from quantize.hashes import file_table

DATA_FILE = f"{MODEL_FILE}.data"


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
    path = folder / MODEL_FILE
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
