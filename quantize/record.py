"""The files beside the graph: config, generation config, tokenizer, and `quantization.json`."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any

import click
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from .chat_template import SYSTEM_WARNING, keeps_system_messages
from .export import read_config
from .hashes import RECORD_FILE, file_table
from .precision import Choice
from .probe import make_probe
from .rotary import context_length, context_limit
from .sources import Source

# One of the two wheels of ONNX Runtime is installed.
_TOOLS = ("onnx", "onnxruntime", "onnxruntime-gpu", "onnxruntime-genai", "torch", "transformers")


def write(
    source: Source,
    folder: Path,
    choice: Choice,
    quantization: dict[str, Any],
    gate: dict[str, Any],
) -> None:
    """Writes them into `folder`, which holds the graph already. `quantization` is what was done to
    it, `gate` what the gate found; both empty for a graph that is not quantized."""
    config = read_config(source.folder)
    tokenizer = _write_files(source.folder, folder, config)
    keeps_system = keeps_system_messages(tokenizer)
    if keeps_system is False:
        click.echo(SYSTEM_WARNING)
    record: dict[str, Any] = {
        "name": source.name,
        "source": source.description,
        "kind": source.kind,
        "precision": choice.precision,
        "device": choice.device,
        "reason": choice.reason,
        "form": source.form,
        "chat_template_system": keeps_system,
        "tools": tool_versions(),
    }
    if limit := context_limit(config):
        record["context_length"], record["context_note"] = limit
    if choice.is_quantized:
        record |= {"quantization": quantization, "gate": gate}
    if choice.device == "cpu":
        record["probe"] = make_probe(folder, tokenizer, context_length(config))
    record["files"] = file_table(folder)
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")


def _write_files(source: Path, folder: Path, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """Config, generation config and tokenizer, which is returned."""
    config.save_pretrained(folder)
    generation = source / "generation_config.json"
    if generation.is_file():  # as it is: transformers refuses to save many that it reads
        shutil.copyfile(generation, folder / generation.name)
    else:
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    tokenizer.save_pretrained(folder)
    return tokenizer


def tool_versions() -> dict[str, str]:
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: installed[name] for name in _TOOLS if name in installed}
