"""Rotary embeddings: how long a context they are right for, and the cos/sin caches of the graph.

The caches are computed by transformers' own modules and written over those of the builder, which
knows fewer kinds of `rope_scaling`. A longrope model (Phi-3 128k) has two sets of factors, and all
keys of a text that is longer than the original context must be rotated by the long ones: those in
the cache would be wrong from then on, in each row for itself. So its context ends there.
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

from .errors import QuantizeError
from .families import outline


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


def rotary_modules(config: PretrainedConfig) -> dict[str, Any]:
    """transformers' own, by what the names of their caches end with: a model that rotates its local
    layers otherwise (Gemma 3) has two.

    Raises QuantizeError for a rotary embedding that the kernel does not take.
    """
    # Its class only: the modules of an outline are empty.
    kind: type[Any] = type(outline(config).model.rotary_emb)
    modules = {"": kind(config)}
    if config.model_type == "gemma3_text":
        local = copy.deepcopy(config)  # as Gemma3TextModel makes it
        local.rope_theta, local.rope_scaling = config.rope_local_base_freq, {"rope_type": "default"}
        modules = {"_global": kind(config), "_local": kind(local)}
    for module in modules.values():
        if len(module.inv_freq) % 8:
            raise QuantizeError(
                f"it rotates {2 * len(module.inv_freq)} dimensions of each head; "
                "GroupQueryAttention needs a multiple of 16"
            )
    return modules


def rotary_caches(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """`cos_cache` and `sin_cache`, each `(context length, rotary dimensions / 2)`, or
    `cos_cache_global`, `cos_cache_local`, …."""
    caches = {}
    positions = torch.arange(context_length(config)).float()
    for suffix, rotary in rotary_modules(config).items():
        # A longrope model starts with its short factors.
        angles = torch.outer(positions, rotary.inv_freq.float())
        caches[f"cos_cache{suffix}"] = angles.cos() * rotary.attention_scaling
        caches[f"sin_cache{suffix}"] = angles.sin() * rotary.attention_scaling
    return caches


def _rope_type(config: PretrainedConfig) -> str:
    scaling: dict[str, Any] = getattr(config, "rope_scaling", None) or {}
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def write_caches(graph: onnx.GraphProto, folder: Path, config: PretrainedConfig) -> None:
    """Writes transformers' caches over the builder's, in the data file beside the graph."""
    initializers = {initializer.name: initializer for initializer in graph.initializer}
    for name, cache in rotary_caches(config).items():
        if name not in initializers or [*initializers[name].dims] != [*cache.shape]:
            raise QuantizeError(
                f"the builder's graph has no {name} of the shape {list(cache.shape)}: its rotary "
                "embedding is not the one that config.json says"
            )
        dtype = onnx.helper.tensor_dtype_to_np_dtype(initializers[name].data_type)
        _overwrite(initializers[name], folder, cache.numpy().astype(dtype))


def _overwrite(tensor: onnx.TensorProto, folder: Path, values: NDArray[np.generic]) -> None:
    place = {entry.key: entry.value for entry in tensor.external_data}
    if int(place["length"]) != values.nbytes:
        raise QuantizeError(f"{tensor.name} takes {place['length']} bytes, not {values.nbytes}")
    with open(folder / place["location"], "r+b") as file:
        file.seek(int(place.get("offset", 0)))
        file.write(values.tobytes())
