"""Many rows of logits -> one token each at random, with one numpy call for all rows where
`candidates.draw_token` has one for each. What it cannot decide so is left to that.

A row's token depends on the row alone: what is done with many rows at once is done element by
element, or adds up each row from its first element on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .candidates import BLOCK, LOW_TEMPERATURE, block_sums, draw_token, exponentials
from .sequence import SamplingParams
from .shortlist import MIN_VOCAB, shortlist

Floats = NDArray[np.float64]
_LEAST = -80.0  # exp of it, 1e-35, adds nothing to a sum that has 1 in it


def draw_tokens(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    tops: NDArray[np.float32],
    params: Many[SamplingParams],
    draws: Floats,
) -> NDArray[np.int64]:
    """Of each of `rows` of `logits`, shape (all rows, vocab), contiguous, the token at share `draw`
    of the mass of its candidates, counted by rising id. `tops`, finite, are the rows' largest; no
    temperature is 0."""
    vocab = logits.shape[1]
    tokens = np.full(len(rows), -1, np.int64)
    if vocab > MIN_VOCAB:
        limits = np.array([(p.temperature, p.min_p, p.top_k, p.top_p) for p in params])
        is_limited = (
            (limits[:, 1] > 0) | ((limits[:, 2] > 0) & (limits[:, 2] < vocab)) | (limits[:, 3] < 1)
        )
        is_warm = limits[:, 0] >= LOW_TEMPERATURE  # else most weights are next to nothing
        for which, draw in (
            (is_limited.nonzero()[0], _draw_limited),
            ((~is_limited & is_warm).nonzero()[0], _draw_from_all),
        ):
            if len(which):
                tokens[which] = draw(logits, rows[which], tops[which], limits[which], draws[which])
    scratch = np.empty(vocab, np.float32) if (tokens < 0).any() else None
    for i in (tokens < 0).nonzero()[0].tolist():
        row = logits[rows[i]]
        tokens[i] = draw_token(row, float(tops[i]), params[i], float(draws[i]), scratch)
    return tokens


def _draw_from_all(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    tops: NDArray[np.float32],
    limits: Floats,
    draws: Floats,
) -> NDArray[np.int64]:
    """Sums of blocks first, then those within one block."""
    vocab = logits.shape[1]
    temperatures = limits[:, 0]
    cumulative = _masses(logits, rows, tops, temperatures).cumsum(axis=1)
    targets = draws * cumulative[:, -1]
    blocks = _first_above(cumulative, targets)
    before = np.where(blocks > 0, cumulative[np.arange(len(rows)), blocks - 1], 0.0)
    ids = blocks[:, None] * BLOCK + np.arange(BLOCK)
    values = logits.reshape(-1).take((rows * vocab)[:, None] + np.minimum(ids, vocab - 1))
    weights = _weights(np.where(ids < vocab, values, -np.inf), tops, temperatures)
    within = weights.cumsum(axis=1)
    return blocks * BLOCK + _first_above(within, targets - before)


def _draw_limited(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    tops: NDArray[np.float32],
    limits: Floats,
    draws: Floats,
) -> NDArray[np.int64]:
    """The order is that of `candidates`; -1 where more than the shortlist matters."""
    temperatures, min_p, top_k, top_p = limits.T
    floors = np.full(len(rows), -np.inf, np.float32)
    has_floor = min_p > 0
    shares = np.where(has_floor, min_p, 1)
    floors[has_floor] = (tops + temperatures * np.log(shares))[has_floor]
    listed = shortlist(logits, rows, floors)
    has_list = listed.counts > 0
    is_cut = (top_k > 0) & (top_k <= listed.counts)
    is_whole = has_list & (is_cut | listed.is_all)
    # Of the others top-p alone needs the row's mass, and only that.
    is_open = has_list & ~is_whole & ~has_floor & (top_p < 1) & ~_limits(top_k, logits.shape[1])
    masses = np.zeros(len(rows))
    opened = is_open.nonzero()[0]
    if len(opened):
        sums = _masses(logits, rows[opened], tops[opened], temperatures[opened])
        masses[opened] = sums.cumsum(axis=1)[:, -1]
    values = listed.values
    if is_cut.any():
        values = _keep_largest(values, np.where(is_cut, top_k, listed.counts).astype(np.int64))
    weights = _weights(values, tops, temperatures)
    cumulative = weights.cumsum(axis=1)
    num_kept = listed.counts
    if (top_p < 1).any():
        num_kept = _nucleus_sizes(weights, top_p, np.where(is_open, masses, cumulative[:, -1]))
        weights = _keep_largest(weights, num_kept, nothing=0.0)
        cumulative = weights.cumsum(axis=1)
    chosen = _first_above(cumulative, draws * cumulative[:, -1])
    chosen = np.minimum(chosen, listed.ids.shape[1] - 1)  # behind it only where there is no list
    tokens = listed.ids[np.arange(len(rows)), chosen]
    is_decided = is_whole | (is_open & (num_kept < listed.counts))
    return np.where(is_decided, tokens, -1)


def _limits(top_k: Floats, vocab: int) -> NDArray[np.bool_]:
    is_on: NDArray[np.bool_] = (top_k > 0) & (top_k < vocab)
    return is_on


def _masses(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    tops: NDArray[np.float32],
    temperatures: Floats,
) -> Floats:
    """The weights of each row added up, by blocks; the largest is 1."""
    scratch = np.empty(logits.shape[1], np.float32)
    each = zip(rows.tolist(), tops.tolist(), temperatures.tolist(), strict=True)
    masses = []
    for row, top, temperature in each:
        values = logits[row]
        if temperature < LOW_TEMPERATURE:  # float32 takes ten times as long for tiny weights
            values = np.maximum(values, np.float32(top + _LEAST * temperature), out=scratch)
        masses.append(block_sums(exponentials(values, top, temperature, scratch)))
    return np.stack(masses)


def _weights(
    values: NDArray[np.float32], tops: NDArray[np.float32], temperatures: Floats
) -> Floats:
    weights: Floats = values.astype(np.float64)
    weights -= tops[:, None]
    weights /= temperatures[:, None]
    return np.exp(weights, out=weights)


def _nucleus_sizes(weights: Floats, top_p: Floats, masses: Floats) -> NDArray[np.int64]:
    """How many of the likeliest reach share p of the mass; all of a row if they do not."""
    cumulative = np.sort(weights, axis=1)[:, ::-1].cumsum(axis=1)
    targets = np.where(top_p < 1, top_p * masses, np.inf)
    sizes: NDArray[np.int64] = (cumulative < targets[:, None]).sum(axis=1) + 1
    return np.minimum(sizes, weights.shape[1])


def _keep_largest(
    values: NDArray[Any], numbers: NDArray[np.int64], nothing: float = -math.inf
) -> NDArray[Any]:
    """The so many largest of each row, of ties the first; `nothing` in place of the others."""
    ordered = np.sort(values, axis=1)
    places = np.clip(values.shape[1] - numbers, 0, values.shape[1] - 1)
    edges = ordered[np.arange(len(values)), places][:, None]
    is_above = values > edges
    is_tie = values == edges
    room = numbers - is_above.sum(axis=1)
    is_kept = is_above | (is_tie & (is_tie.cumsum(axis=1) <= room[:, None]))
    kept: NDArray[Any] = np.where(is_kept, values, values.dtype.type(nothing))
    return kept


def _first_above(cumulative: Floats, targets: Floats) -> NDArray[np.int64]:
    """Of each row the first place whose sum exceeds its target."""
    # However a target was rounded, it must not lead behind the last weight that is not 0.
    last = np.nextafter(cumulative[:, -1], 0.0)
    first: NDArray[np.int64] = (cumulative <= np.minimum(targets, last)[:, None]).sum(axis=1)
    return first
