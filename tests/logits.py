"""Rows of a real graph, driven without the engine, and their logits beside those of torch."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from app.engine import Model
from app.kv_cache import KVCache
from app.model import OnnxModel
from app.sequence import PrefillChunk, Sequence, StepPlan

from .engines import greedy
from .tiny import TorchReference

LENGTHS = [1, 7, 33]
TOLERANCE = 2e-4


def ids_of_length(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}-{seed}").choices(range(3, 290), k=length)


def cache_for(model: OnnxModel, num_rows: int = 8) -> KVCache:
    return KVCache(model.spec.kv, num_rows, 256, model.device)


def prefill(
    model: OnnxModel, cache: KVCache, row: int, ids: list[int], chunk: int = 256
) -> Sequence:
    """Reads a prompt into `row`, in chunks; the sequence then holds its greedy first token."""
    sequence = greedy(f"row-{row}", ids)
    for start in range(0, len(ids), chunk):
        piece = PrefillChunk(sequence, row, start, ids[start : start + chunk])
        logits = model.forward(StepPlan([], piece, []), cache)
        sequence.num_cached += len(piece.token_ids)
    sequence.output_ids.append(int(logits[0].argmax()))
    return sequence


class LogitsCheck:
    """A model that compares every row of logits with those of torch for all the row's ids."""

    def __init__(self, model: Model, reference: TorchReference) -> None:
        self._model = model
        self._reference = reference
        self.num_rows = 0

    def forward(self, plan: StepPlan, cache: KVCache) -> NDArray[np.float32]:
        logits = self._model.forward(plan, cache)
        for row, sequence in enumerate(plan.sampled):
            expected = self._reference.logits([*sequence.prompt_ids, *sequence.output_ids])[-1]
            np.testing.assert_allclose(logits[row], expected, atol=TOLERANCE)
            self.num_rows += 1
        return logits
