"""Rotary embeddings: how long a context they are right for, and the cos/sin caches of the graph.

The caches are computed by transformers' own functions and written over those of the builder, which
knows fewer kinds of `rope_scaling` and gets some wrong. A longrope model (Phi-3 128k) has two sets
of factors, and transformers rotates *all* keys by the long ones as soon as a text is longer than
the original context: the keys in the cache would be wrong from then on, in every row for itself.
So its context ends where the short factors end.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .errors import QuantizeError


def context_limit(config: PretrainedConfig) -> tuple[int, str] | None:
    """Tokens that the graph is right for and why, if fewer than `max_position_embeddings`."""
    original = getattr(config, "original_max_position_embeddings", None)
    if _rope_type(config) != "longrope" or not original:
        return None
    if original >= config.max_position_embeddings:
        return None
    return original, (
        f"the graph takes {original} of the model's {config.max_position_embeddings} tokens: a "
        "longer text needs other rotary factors (longrope) from its first token on"
    )


def context_length(config: PretrainedConfig) -> int:
    """Tokens that the graph is right for."""
    limit = context_limit(config)
    return int(config.max_position_embeddings) if limit is None else limit[0]


def rotary_caches(config: PretrainedConfig, is_local: bool = False) -> dict[str, torch.Tensor]:
    """`cos` and `sin`, each `(context length, rotary dimensions / 2)`, of the short factors.

    Raises QuantizeError for a rotary embedding that transformers or the kernel does not know.
    """
    if is_local:  # as Gemma3TextModel makes the config of its local layers
        config = copy.deepcopy(config)
        config.rope_theta, config.rope_scaling = config.rope_local_base_freq, None
    kind = _rope_type(config)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise QuantizeError(
            f"transformers does not know its rope_scaling {kind!r} (it knows "
            f"{', '.join(sorted(ROPE_INIT_FUNCTIONS))})"
        )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    if len(inv_freq) % 8:
        raise QuantizeError(
            f"it rotates {2 * len(inv_freq)} dimensions of each head; GroupQueryAttention needs a "
            "multiple of 16"
        )
    angles = torch.outer(torch.arange(context_length(config)).float(), inv_freq.float())
    return {"cos": angles.cos() * attention_factor, "sin": angles.sin() * attention_factor}


def _rope_type(config: PretrainedConfig) -> str:
    scaling: dict[str, Any] = getattr(config, "rope_scaling", None) or {}
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def write_caches(graph: onnx.GraphProto, folder: Path, config: PretrainedConfig) -> None:
    """Writes transformers' caches over the builder's, in the data file beside the graph."""
    for initializer in graph.initializer:
        name, _, place = initializer.name.partition("_cache")
        if name not in ("cos", "sin"):
            continue
        cache = rotary_caches(config, is_local=place == "_local")[name]
        if tuple(initializer.dims) != tuple(cache.shape):
            raise QuantizeError(
                f"the builder's {initializer.name} is {list(initializer.dims)}, transformers' is "
                f"{list(cache.shape)}: the rotary embedding is not the one that config.json says"
            )
        dtype = onnx.helper.tensor_dtype_to_np_dtype(initializer.data_type)
        _overwrite(initializer, folder, cache.numpy().astype(dtype))


def _overwrite(tensor: onnx.TensorProto, folder: Path, values: NDArray[np.generic]) -> None:
    place = {entry.key: entry.value for entry in tensor.external_data}
    if int(place["length"]) != values.nbytes:
        raise QuantizeError(f"{tensor.name} takes {place['length']} bytes, not {values.nbytes}")
    with open(folder / place["location"], "r+b") as file:
        file.seek(int(place.get("offset", 0)))
        file.write(values.tobytes())
