"""A Hugging Face folder: is all there that a build needs, and how large is the model?

Looked at before any work, in order of cost: config.json, the weights' headers, the tokenizer.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import check_complete, read_headers
from .errors import QuantizeError
from .forms import Form, choose_form
from .json_file import read_json
from .space import Size

_JOINED = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
# Slow tokenizers that transformers turns into fast ones without another library.
_PLAIN_VOCABULARIES = ({"vocab.json", "merges.txt"},)


def check_folder(folder: Path) -> tuple[Form, Size]:
    """Raises QuantizeError, naming the file, if something is missing or not whole."""
    form, num_embedded = check_config(folder, f"{folder} is no Hugging Face folder")
    headers = read_headers(folder)
    if form == "fused":
        # Imported here, like all that takes seconds: a missing file should be told at once.
        from .export import read_config

        check_complete(folder, headers, read_config(folder))
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
    config = read_config_json(folder, otherwise)
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


def read_config_json(folder: Path, otherwise: str) -> dict[str, Any]:
    """Raises QuantizeError, which begins with `otherwise` if the file is missing."""
    path = folder / "config.json"
    if not path.is_file():
        raise QuantizeError(f"{otherwise}: {path.name} is missing")
    return read_json(path)


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
