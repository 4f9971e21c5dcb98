"""The files beside the graph: config, generation config, tokenizer, and `quantization.json`."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from . import int8
from .export import MODEL_FILE
from .sources import Source

_TOOLS = ("onnx", "onnxruntime", "onnxruntime-genai", "torch", "transformers")


def write(source: Source, folder: Path, precision: str, num_quantized: int) -> None:
    """Writes them into `folder`, which holds the graph already."""
    config = AutoConfig.from_pretrained(source.folder, local_files_only=True)
    config.save_pretrained(folder)
    if (source.folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(source.folder, local_files_only=True)
    else:
        generation = GenerationConfig.from_model_config(config)
    generation.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
    tokenizer.save_pretrained(folder)
    files = {name: (folder / name).stat().st_size for name in (MODEL_FILE, f"{MODEL_FILE}.data")}
    record = {
        "name": source.name,
        "source": source.description,
        "precision": precision,
        "form": "fused",
        "bytes": files,
        "tools": {name: importlib.metadata.version(name) for name in _TOOLS},
    }
    if precision == "int8":
        record["quantization"] = {
            "operator": "MatMulNBits",
            "bits": 8,
            "block_size": int8.BLOCK_SIZE,
            "accuracy_level": int8.ACCURACY_LEVEL,
            "matrices": num_quantized,
        }
    (folder / "quantization.json").write_text(json.dumps(record, indent=2) + "\n")
