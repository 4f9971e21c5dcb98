"""The likeliest few tokens of many rows at once: a list of each row that holds all of its tokens
from a bound on, found without sorting the vocabulary or passing over it twice. The bound is a floor
that is asked for, or what about 128 tokens reach.

A row's list depends on the row alone; the width of the arrays on the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DEPTH = 8
_NUM_GROUPS = 512
_AIM = 128  # tokens of a list at least, if the row has no floor
_MOST = 512  # columns that reach the bound: a row with more, as of equal logits, has no list
MIN_VOCAB = _DEPTH * _NUM_GROUPS


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Of each row its tokens that reach its bound, by rising id; behind them -inf."""

    ids: NDArray[np.int64]  # (rows, width)
    values: NDArray[np.float32]  # (rows, width)
    counts: NDArray[np.int64]  # (rows,); 0: there is no list
    is_all: NDArray[np.bool_]  # (rows,): it holds all that is wanted


def shortlist(
    logits: NDArray[np.float32], rows: NDArray[np.int64], floors: NDArray[np.float32]
) -> Shortlist:
    """Of `rows` of `logits`, shape (all rows, vocab), contiguous, their largest finite; a token
    below a row's floor is not wanted. The vocabulary has at least `MIN_VOCAB` tokens.

    Column i are the tokens i, i + columns, i + 2 columns... (numpy takes maxima fastest that way).
    The k-th largest of the maxima of any blocks is not above the k-th largest value, so only
    columns whose maximum reaches it have to be looked at.
    """
    vocab = logits.shape[1]
    num_columns, num_left = divmod(vocab, _DEPTH)
    maxima = np.empty((len(rows), num_columns), np.float32)
    for place, row in enumerate(rows.tolist()):
        head = logits[row, : _DEPTH * num_columns].reshape(_DEPTH, num_columns)
        head.max(axis=0, out=maxima[place])
    if num_left:
        end = logits[rows, _DEPTH * num_columns :]
        np.maximum(maxima[:, :num_left], end, out=maxima[:, :num_left])
    groups = maxima[:, : num_columns - num_columns % _NUM_GROUPS]
    groups = groups.reshape(len(rows), -1, _NUM_GROUPS).max(axis=1)
    bounds = np.partition(groups, -_AIM, axis=1)[:, -_AIM]
    lowest = np.finfo(np.float32).min  # -inf is no candidate
    is_all = (floors > lowest) | (bounds < lowest)
    bounds = np.maximum(np.where(floors > lowest, floors, bounds), lowest)
    places, ids = _reaching(logits, rows, maxima, bounds)
    return _padded(logits, rows, places, ids, is_all)


def _reaching(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    maxima: NDArray[np.float32],
    bounds: NDArray[np.float32],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Place in `rows` and id of each token that reaches its row's bound, by place, then id."""
    vocab, num_columns = logits.shape[1], maxima.shape[1]
    hits = (maxima >= bounds[:, None]).ravel().nonzero()[0]
    places = hits // num_columns
    is_crowded = np.bincount(places, minlength=len(rows)) > _MOST
    if is_crowded.any():
        kept = ~is_crowded[places]
        hits, places = hits[kept], places[kept]
    columns = hits - places * num_columns
    depth = _DEPTH + (vocab % _DEPTH > 0)
    ids = columns[:, None] + num_columns * np.arange(depth)  # (hits, depth)
    if depth > _DEPTH:
        is_token = ids < vocab
        np.minimum(ids, vocab - 1, out=ids)
    values = logits.reshape(-1).take(ids + (rows[places] * vocab)[:, None])
    reaches = values >= bounds[places][:, None]
    if depth > _DEPTH:
        reaches &= is_token
    found = reaches.ravel().nonzero()[0]
    keys = places[found // depth] * vocab + ids.ravel()[found]
    keys.sort()
    places = keys // vocab
    return places, keys - places * vocab


def _padded(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
    ids: NDArray[np.int64],
    is_all: NDArray[np.bool_],
) -> Shortlist:
    vocab = logits.shape[1]
    counts = np.bincount(places, minlength=len(rows))
    starts = counts.cumsum() - counts
    shape = (len(rows), max(int(counts.max(initial=0)), 1))
    cells = np.arange(len(ids)) + (np.arange(len(rows)) * shape[1] - starts)[places]
    padded_ids = np.zeros(shape, np.int64)
    padded_ids.reshape(-1)[cells] = ids
    values = np.full(shape, -np.inf, np.float32)
    values.reshape(-1)[cells] = logits.reshape(-1).take(rows[places] * vocab + ids)
    return Shortlist(padded_ids, values, counts, is_all)
