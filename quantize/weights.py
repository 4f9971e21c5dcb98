"""Whether a source holds every weight of its model: transformers only warns, and fills what is
missing with random numbers."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from transformers import PretrainedConfig

from .errors import QuantizeError
from .families import outline


def check_weights(source: Path, config: PretrainedConfig) -> None:
    """Reads names only. Raises QuantizeError with the first weight that is missing."""
    found: set[str] = set()
    for file in sorted(source.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                found.update(tensors.keys())
        except Exception as error:  # safetensors has an error type of its own
            raise QuantizeError(f"{file} is damaged: {error}") from error
    model = outline(config)
    needed = set(model.state_dict())
    if config.tie_word_embeddings:
        needed -= set(model._tied_weights_keys or [])
    missing = sorted(needed - found)
    if missing:
        raise QuantizeError(
            f"{source} lacks {len(missing)} of the model's {len(needed)} weights, {missing[0]} "
            "among them"
        )
