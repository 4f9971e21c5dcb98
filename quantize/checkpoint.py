"""The weights of a Hugging Face folder: which safetensors files hold them, and are all there?

Only the headers of the files are read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import QuantizeError
from .json_file import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Headers = Mapping[Path, Mapping[str, Any]]  # of each file: its tensors' names, types and shapes

_SINGLE = "model.safetensors"
INDEX = f"{_SINGLE}.index.json"
_MAX_HEADER = 100_000_000  # bytes, as the safetensors format has it
_BIN = "pickle files can run code when they are loaded: convert them to safetensors"


def read_headers(folder: Path) -> Headers:
    """Raises QuantizeError, naming the file, if one is missing or not whole."""
    headers = {path: _read_header(path) for path in _weight_files(folder)}
    if list(headers) != [folder / _SINGLE]:
        _check_index(folder, headers)
    return headers


def check_complete(folder: Path, headers: Headers, config: PretrainedConfig) -> None:
    """Raises QuantizeError if a weight of the model is in no file."""
    from .families import outline

    model = outline(config)
    needed = set(model.state_dict())
    if config.tie_word_embeddings:
        needed -= set(model._tied_weights_keys or [])
    refuse_missing(folder, needed.difference(*headers.values()))


def refuse_missing(folder: Path, missing: Collection[str]) -> None:
    """transformers only warns of them, and puts random numbers in their place."""
    if missing:
        raise QuantizeError(
            f"{folder} lacks {len(missing)} of the model's weights, {min(missing)} among them"
        )


def stored_type(headers: Headers) -> str | None:
    """The type that all weights are stored in, as safetensors calls it; None if they differ."""
    found = {str(tensor["dtype"]) for header in headers.values() for tensor in header.values()}
    return found.pop() if len(found) == 1 else None


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read. Raises QuantizeError if one is missing."""
    if (single := folder / _SINGLE).is_file():
        return [single]
    if not (folder / INDEX).is_file():
        found = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt"})
        reason = f"only {', '.join(found)}; {_BIN}" if found else "neither model.safetensors nor it"
        raise QuantizeError(f"{folder} holds no .safetensors weights and {INDEX}: {reason}")
    shards = sorted(set(_weight_map(folder).values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise QuantizeError(
            f"{folder} lacks {len(missing)} of the {len(shards)} files that {INDEX} names: "
            f"{', '.join(missing)}"
        )
    return [folder / name for name in shards]


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise QuantizeError(f"{folder / INDEX} names no weights")
    outside = [name for name in weight_map.values() if Path(str(name)).name != name]
    if outside:
        raise QuantizeError(f"{folder / INDEX} names {outside[0]!r}, which is outside the folder")
    return weight_map


def _read_header(path: Path) -> dict[str, Any]:
    """Names, types and shapes of the tensors in a safetensors file, which must be whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _MAX_HEADER):
            raise QuantizeError(f"{path} is cut short, or no safetensors file ({size:,} bytes)")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise QuantizeError(f"{path} is no safetensors file: {error!r}") from error
    if size != 8 + length + end:
        raise QuantizeError(
            f"{path} is not whole: {size:,} bytes, and its header says {8 + length + end:,}"
        )
    return header


def _check_index(folder: Path, headers: Headers) -> None:
    for tensor, shard in _weight_map(folder).items():
        if tensor not in headers[folder / shard]:
            raise QuantizeError(f"{folder / shard} lacks {tensor}, which {INDEX} says is in it")
