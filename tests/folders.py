"""Changed copies of a model folder: another record, another weight, another precision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from quantize import MODEL_FILE


def copy_of(folder: Path, target: Path, **record: Any) -> Path:
    """With `record` added to its quantization.json."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    path = target / "quantization.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | record))
    return target


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


def make_probe(folder: Path, token_ids: list[int], num_top: int = 8) -> dict[str, Any]:
    """What the folder's graph says here, by a session of its own."""
    session = ort.InferenceSession(folder / MODEL_FILE)
    feeds = {"input_ids": np.array([token_ids]), "attention_mask": np.ones((1, len(token_ids)))}
    feeds = {name: values.astype(np.int64) for name, values in feeds.items()}
    for node in session.get_inputs()[2:]:
        feeds[node.name] = np.zeros((1, node.shape[1], 0, node.shape[3]), np.float32)
    logits = session.run(["logits"], feeds)[0][0, 0]
    top_ids = np.argsort(-logits)[:num_top]
    return {
        "token_ids": token_ids,
        "top_ids": top_ids.tolist(),
        "top_logits": logits[top_ids].tolist(),
        "max_difference": 0.01,
    }
