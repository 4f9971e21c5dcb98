"""Whether a source holds every weight of its model: transformers only warns, and fills what is
missing with random numbers."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from transformers import PretrainedConfig

from .errors import QuantizeError
from .families import outline


def check_weights(source: Path, found: Set[str], config: PretrainedConfig) -> None:
    """`found` are the names in the files of `source`. Raises QuantizeError with the first weight
    that is missing."""
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
