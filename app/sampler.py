"""Logits -> token ids, in numpy. A row's choice depends on its own logits, parameters, seed and
number of tokens so far, never on its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sequence import SamplingParams, Sequence, TokenLogprobs

NO_MASKS: Mapping[int, NDArray[np.uint32]] = MappingProxyType({})

# A nucleus nearly always lies within this many tokens; only else is the vocabulary sorted.
_NUCLEUS_HEAD = 1024


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry per row of logits: the chosen token, and whether the row could be trusted."""

    token_ids: NDArray[np.int64]  # (rows,)
    is_finite: NDArray[np.bool_]  # (rows,), the model's logits are numbers
    has_choice: NDArray[np.bool_]  # (rows,), the request permits a token at least
    logprobs: Mapping[int, TokenLogprobs]  # of the rows that asked for them


def sample(
    logits: NDArray[np.float32],
    sequences: list[Sequence],
    masks: Mapping[int, NDArray[np.uint32]] = NO_MASKS,
) -> Sampled:
    """Chooses the next token of each row of `logits`, shape (rows, vocab).

    `masks` holds of some rows a bit per token, the lowest of each word first: 1 if the row's
    grammar permits it.

    A row with a NaN or +inf, or of -inf only, is marked not finite and its token is meaningless;
    the other rows are not affected.
    """
    model_logits, has_choice = logits, np.ones(len(sequences), np.bool_)
    if masks:
        logits = logits.copy()
        for row, mask in masks.items():
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: logits.shape[1]]
            logits[row, bits == 0] = -np.inf
            has_choice[row] = bits.any()
    token_ids = logits.argmax(axis=1)
    # argmax finds a NaN before any number, so the maximum tells for the whole row.
    is_finite = np.isfinite(model_logits.max(axis=1, initial=-np.inf))
    for row, sequence in enumerate(sequences):
        if sequence.params.temperature > 0 and is_finite[row] and has_choice[row]:
            draw = uniform(sequence.params.seed, step=len(sequence.output_ids))
            token_ids[row] = _draw(logits[row], sequence.params, draw)
    return Sampled(token_ids, is_finite, has_choice, {})


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) fixed by `seed` and `step`.

    Philox is a counter-based generator (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", 2011): any element of a seed's stream is had without drawing those before it.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=step)).random())


def _draw(logits: NDArray[np.float32], params: SamplingParams, draw: float) -> int:
    """Inverse-CDF choice among the candidates that top-k, then top-p leave."""
    candidates = None if params.top_k == 0 else _largest(logits, params.top_k)  # None: all
    scaled = logits.astype(np.float64) if candidates is None else logits[candidates].astype(float)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf
        weights = np.exp((scaled - scaled.max()) / params.temperature)
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, params.top_p)
        candidates = nucleus if candidates is None else candidates[nucleus]
        weights = weights[nucleus]
    cumulative = weights.cumsum()
    chosen = np.searchsorted(cumulative, draw * cumulative[-1], side="right")
    return int(chosen if candidates is None else candidates[chosen])


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the smallest set whose share of the mass reaches `top_p`, likeliest first.

    Holtzman et al., "The curious case of neural text degeneration", 2019.
    """
    target = top_p * weights.sum()
    head = _largest(weights, _NUCLEUS_HEAD)
    if weights[head].sum() < target:
        head = np.arange(len(weights))
    # A stable sort by falling weight: ties go to the lower id, as argmax does.
    order = head[np.argsort(-weights[head], kind="stable")]
    num_kept = int(np.searchsorted(weights[order].cumsum(), target)) + 1
    return order[:num_kept]


def _largest(values: NDArray[Any], k: int) -> NDArray[np.int64]:
    """The indices of the `k` largest values, in rising order; ties go to the lower index."""
    if k >= len(values):
        return np.arange(len(values))
    threshold = np.partition(values, -k)[-k]
    above = np.flatnonzero(values > threshold)
    ties = np.flatnonzero(values == threshold)[: k - len(above)]
    return np.sort(np.concatenate([above, ties]))
