"""What lies in a model folder beside the weights: the graph file, and what the JSON files claim.

Two layouts, and a folder may have both: Hugging Face's `config.json`, and ONNX Runtime GenAI's
`genai_config.json` (Microsoft's published folders). Reads small files only; knows neither the
protobuf (`graph.py`) nor a session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UnservableModel
from .record import read_record

GRAPH_FILE = "model.onnx"
CONFIG_FILE = "config.json"
GENAI_FILE = "genai_config.json"

# What the server wants to know -> how model types call it, likeliest first.
_CONFIG_NAMES = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "sliding_window": ("sliding_window",),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
}
_GENAI_NAMES = {
    "context_length": ("context_length",),
    "vocab_size": ("vocab_size",),
}
_DECODER_NAMES = {
    "num_layers": ("num_hidden_layers",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_size",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
}


@dataclass(frozen=True, slots=True)
class Claims:
    """What one JSON file says of the model; None where it is silent."""

    file: str
    context_length: int | None = None
    short_context: int | None = None  # up to where a longrope model takes its short factors
    sliding_window: int | None = None  # None: attention looks back to the start
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    hidden_size: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class IoNames:
    """How the graph calls what it takes and gives; `%d` stands for the layer."""

    input_ids: str = "input_ids"
    attention_mask: str = "attention_mask"
    position_ids: str = "position_ids"
    past_key: str = "past_key_values.%d.key"
    past_value: str = "past_key_values.%d.value"
    logits: str = "logits"
    present_key: str = "present.%d.key"
    present_value: str = "present.%d.value"


def find_graph(folder: Path) -> Path:
    """`model.onnx`, else the file that genai_config.json names, else the only `.onnx` file."""
    if (folder / GRAPH_FILE).is_file():
        return folder / GRAPH_FILE
    named = _decoder(folder).get("filename")
    if named is not None:
        if not isinstance(named, str) or Path(named).name != named:
            raise UnservableModel(f"{folder / GENAI_FILE}: filename is {named!r}, no file's name")
        if not (folder / named).is_file():
            raise UnservableModel(f"{folder / GENAI_FILE} names {named!r}, which is not there")
        return folder / named
    found = sorted(folder.glob("*.onnx"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(file.name for file in found)
        raise UnservableModel(
            f"'{folder}' has several graphs ({names}): name the one to serve {GRAPH_FILE}"
        )
    raise UnservableModel(
        f"'{folder}' is not a model folder: it has no {GRAPH_FILE}, nor another .onnx file. "
        "Build one with 'make model' or 'python -m quantize'."
    )


def read_claims(folder: Path) -> list[Claims]:
    """What config.json and genai_config.json say, as far as they are there."""
    return [claims for claims in (_of_config(folder), _of_genai(folder)) if claims is not None]


def read_context_length(folder: Path) -> int:
    """Tokens that the folder promises: the smallest number that one of its files gives.

    A longrope graph of which no record tells how far it is right is so up to its short context
    only: behind it, a row's cached keys have been turned by other factors than its new ones.
    """
    claims, recorded = read_claims(folder), read_record(folder).context_length
    numbers = [claim.context_length for claim in claims] + [recorded]
    if not any(numbers):
        read = " and ".join(str(folder / claim.file) for claim in claims)
        raise UnservableModel(
            f"the model's context (max_position_embeddings, n_positions or context_length) is told "
            f"nowhere: {read or f'neither {CONFIG_FILE} nor {GENAI_FILE}'} was read"
        )
    if recorded is None:
        numbers += [claim.short_context for claim in claims]
    smallest = min(number for number in numbers if number is not None)
    if smallest < 2:
        raise UnservableModel(f"{folder}: a context of {smallest} tokens leaves no room")
    return smallest


def read_io_names(folder: Path) -> IoNames:
    """The graph's names as genai_config.json gives them; else those of optimum's exporter."""
    path, decoder, usual = folder / GENAI_FILE, _decoder(folder), IoNames()
    inputs, outputs = _object(path, decoder, "inputs"), _object(path, decoder, "outputs")
    for block, name in ((inputs, "past_names"), (outputs, "present_names")):
        if block.get(name) is not None:
            raise UnservableModel(
                f"{path}: {name} names a combined cache (keys and values of a layer in one tensor),"
                " which is not served: export the graph with keys and values apart"
            )
    return IoNames(
        input_ids=_name(path, inputs, "input_ids", usual.input_ids),
        attention_mask=_name(path, inputs, "attention_mask", usual.attention_mask),
        position_ids=_name(path, inputs, "position_ids", usual.position_ids),
        past_key=_name(path, inputs, "past_key_names", usual.past_key),
        past_value=_name(path, inputs, "past_value_names", usual.past_value),
        logits=_name(path, outputs, "logits", usual.logits),
        present_key=_name(path, outputs, "present_key_names", usual.present_key),
        present_value=_name(path, outputs, "present_value_names", usual.present_value),
    )


def _name(path: Path, block: Mapping[str, Any], field: str, usual: str) -> str:
    """Of an input or output; one of each layer has a single `%d` for its number."""
    name = block.get(field, usual)
    if not isinstance(name, str):
        raise UnservableModel(f"{path}: {field} is {name!r}, no name")
    if "%d" in usual and not (name.count("%") == name.count("%d") == 1):
        raise UnservableModel(f"{path}: {field} is {name!r}; it needs one %d, for the layer")
    return name


def _object(path: Path, block: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Empty if it is not there."""
    found = block.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UnservableModel(f"{path}: {name} is not an object")
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """None if the file is not there."""
    try:
        content = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise UnservableModel(f"{path} is not valid JSON: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise UnservableModel(f"{path} is not a JSON object")
    return content


def _of_config(folder: Path) -> Claims | None:
    path = folder / CONFIG_FILE
    config = read_json(path)
    if config is None:
        return None
    config = _object(path, config, "text_config") or config  # of a model that sees or hears as well
    numbers = _numbers(path, config, _CONFIG_NAMES)
    if not _has_window(path, config):
        numbers.pop("sliding_window", None)
    # Phi-3's files say "su" for what was named longrope later.
    rope = _object(path, config, "rope_scaling")
    if rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
        short = {"short_context": ("original_max_position_embeddings",)}
        numbers |= _numbers(path, rope | config, short)
    return Claims(CONFIG_FILE, **numbers)


def _has_window(path: Path, config: Mapping[str, Any]) -> bool:
    """Qwen2 names a window and does not use it, Qwen3 may use it in no layer."""
    kinds = config.get("layer_types") or ["sliding_attention"]
    if not isinstance(kinds, list):
        raise UnservableModel(f"{path}: layer_types is not a list")
    return config.get("use_sliding_window", True) is not False and "sliding_attention" in kinds


def _of_genai(folder: Path) -> Claims | None:
    path = folder / GENAI_FILE
    model = _object(path, read_json(path) or {}, "model")
    if not model:
        return None
    numbers = _numbers(path, model, _GENAI_NAMES)
    numbers |= _numbers(path, _decoder(folder), _DECODER_NAMES)
    return Claims(GENAI_FILE, **numbers)


def _decoder(folder: Path) -> dict[str, Any]:
    path = folder / GENAI_FILE
    return _object(path, _object(path, read_json(path) or {}, "model"), "decoder")


def _numbers(
    path: Path, block: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]
) -> dict[str, int]:
    found: dict[str, int] = {}
    for ours, theirs in names.items():
        name = next((name for name in theirs if block.get(name) is not None), None)
        if name is None:
            continue
        value = block[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnservableModel(f"{path}: {name} is {value!r}, not a number from 1 on")
        found[ours] = value
    return found
