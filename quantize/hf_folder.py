"""A Hugging Face folder: is all there that a build needs, and how large is the model?

Looked at before any work, in order of cost: config.json, the weights' headers, the tokenizer.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import QuantizeError
from .forms import Form, choose_form
from .space import Size

Headers = Mapping[Path, Mapping[str, Any]]  # of each file: its tensors' names, types and shapes

INDEX = "model.safetensors.index.json"
_JOINED = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_MAX_HEADER = 100_000_000  # bytes, as the safetensors format has it
_BIN = "pickle files can run code when they are loaded: convert them to safetensors"
# Slow tokenizers that transformers turns into fast ones without another library.
_PLAIN_VOCABULARIES = ({"vocab.json", "merges.txt"},)


def check_folder(folder: Path) -> tuple[Form, Size]:
    """Raises QuantizeError, naming the file, if something is missing or not whole."""
    form, num_embedded = check_config(folder, f"{folder} is no Hugging Face folder")
    headers = read_headers(folder)
    _check_index(folder, headers)
    if form == "fused":
        # Imported here, like all that takes seconds: a missing file should be told at once.
        from .export import read_config
        from .weights import check_weights

        check_weights(folder, set().union(*headers.values()), read_config(folder))
    check_tokenizer(folder)
    tensors = [item for header in headers.values() for item in header.items()]
    return form, Size(
        num_parameters=sum(math.prod(tensor["shape"]) for _, tensor in tensors),
        num_embedded=num_embedded,
        num_bytes=sum(path.stat().st_size for path in headers),
        num_joined_bytes=sum(_bytes(tensor) for name, tensor in tensors if name.endswith(_JOINED)),
        form=form,
    )


def _bytes(tensor: Mapping[str, Any]) -> int:
    begin, end = tensor["data_offsets"]
    return int(end - begin)


def check_config(folder: Path, otherwise: str) -> tuple[Form, int]:
    """The form that the model gets, and the parameters of its embedding. Raises QuantizeError,
    which begins with `otherwise` if config.json is missing, for a model that gets none."""
    config = read_json(folder / "config.json", otherwise)
    form = choose_form(config)
    if form == "fused":
        from .export import read_config
        from .families import check
        from .rotary import rotary_modules

        check(known := read_config(folder))
        rotary_modules(known)
    return form, embedded(config)


def embedded(config: Mapping[str, Any]) -> int:
    """Parameters of the embedding, or 0 if config.json calls its sizes something else."""
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    return int((config.get("vocab_size") or 0) * hidden)


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    if not path.is_file():
        raise QuantizeError(f"{otherwise}: {path.name} is missing")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise QuantizeError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise QuantizeError(f"{path} holds no JSON object")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read. Raises QuantizeError if one is missing."""
    if (single := folder / "model.safetensors").is_file():
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
    weight_map = read_json(folder / INDEX, str(folder)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise QuantizeError(f"{folder / INDEX} names no weights")
    outside = [name for name in weight_map.values() if Path(str(name)).name != name]
    if outside:
        raise QuantizeError(f"{folder / INDEX} names {outside[0]!r}, which is outside the folder")
    return weight_map


def read_headers(folder: Path) -> Headers:
    return {path: read_header(path) for path in weight_files(folder)}


def stored_type(headers: Headers) -> str | None:
    """The type that all weights are stored in, as safetensors calls it; None if they differ."""
    found = {str(tensor["dtype"]) for header in headers.values() for tensor in header.values()}
    return found.pop() if len(found) == 1 else None


def read_header(path: Path) -> dict[str, Any]:
    """Names, types and shapes of the tensors in a safetensors file, which must be whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _MAX_HEADER):
            raise QuantizeError(f"{path} is cut off, or no safetensors file ({size:,} bytes)")
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
    if list(headers) == [folder / "model.safetensors"]:
        return
    for tensor, shard in _weight_map(folder).items():
        if tensor not in headers[folder / shard]:
            raise QuantizeError(f"{folder / shard} lacks {tensor}, which {INDEX} says is in it")


def check_tokenizer(folder: Path) -> None:
    """Raises QuantizeError unless a fast tokenizer can be had from the files of `folder`."""
    names = {entry.name for entry in folder.iterdir()}
    has_plain = any(wanted <= names for wanted in _PLAIN_VOCABULARIES)
    if "tokenizer.json" not in names and not has_plain:
        if "tokenizer.model" not in names:
            raise QuantizeError(f"{folder} holds no fast tokenizer: tokenizer.json is missing")
        _require_converter(folder / "tokenizer.model")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of tokenizers, transformers and the files themselves
        raise QuantizeError(f"the tokenizer in {folder} cannot be used: {error}") from error
    if not tokenizer.is_fast:
        raise QuantizeError(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) has no fast form: "
            "give a folder with tokenizer.json"
        )


def _require_converter(model: Path) -> None:
    """tiktoken's files are lines of base64 and a rank, sentencepiece's are protobuf."""
    with model.open("rb") as file:
        parts = file.readline().split()
    library = "tiktoken" if len(parts) == 2 and parts[1].isdigit() else "sentencepiece"
    if importlib.util.find_spec(library) is None:
        raise QuantizeError(
            f"{model.parent} has {model.name} but no tokenizer.json; to convert it, {library} is "
            f"needed, which is not installed: give tokenizer.json, or `pip install {library}`"
        )
