"""One row of logits -> one token at random: min-p, top-k and top-p say which tokens are left, a
number in [0, 1) says which of them it is. Knows of parameters and arrays only.

The whole vocabulary is passed over in float32 and never sorted: what is sorted, and what decides
at a border, are the few tokens that can matter, in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sequence import SamplingParams

# Longer rows get their weights in float32: 1e-6 of a weight, and a third of the time of float64.
_MAX_EXACT = 4096
BLOCK = 128
_FEW = 512
_MIN_TEMPERATURE = 1e-30  # float32 does not know the inverse of a much smaller number
# At low temperatures most weights of a long row are next to nothing: all those below this share of
# the largest are less than 1e-8 of the mass, and float32 takes ten times as long for them.
LOW_TEMPERATURE = 0.4
_NEGLIGIBLE = 1e-14


def draw_token(
    logits: NDArray[np.float32],
    top: float,
    params: SamplingParams,
    draw: float,
    scratch: NDArray[np.float32] | None = None,
) -> int:
    """The token at share `draw` of the mass of the `candidates`, counted by rising id."""
    ids, weights = candidates(logits, top, params, scratch)
    chosen = _inverse_cdf(weights, draw)
    return chosen if ids is None else int(ids[chosen])


def candidates(
    logits: NDArray[np.float32],
    top: float,
    params: SamplingParams,
    scratch: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.int64] | None, NDArray[Any]]:
    """The tokens that may be drawn, by rising id (None: all), and each one's weight.

    The order is vLLM's (v1/sample/sampler.py): temperature, min-p, top-k, top-p, each of what the
    one before has left. As min-p and top-k both keep the likeliest, these two may be swapped.
    Top-k leaves k tokens: of ties the lower ids, where vLLM and transformers keep them all.

    `top`, finite, is the largest of `logits`, shape (vocab,). The temperature is not 0. The weights
    may lie in `scratch`, of the same shape.
    """
    ids: NDArray[np.int64] | None = None
    values = logits
    if (share := _least_share(params, len(logits))) > 0:
        ids = at_least(logits, top, share, params.temperature)
        values = values[ids]
    if 0 < params.top_k < len(values):
        kept = np.sort(largest(values, params.top_k))
        ids = kept if ids is None else ids[kept]
        values = values[kept]
    weights = exponentials(values, top, params.temperature, scratch)
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    return ids, weights


def _least_share(params: SamplingParams, vocab: int) -> float:
    if params.temperature < LOW_TEMPERATURE and params.top_k == 0 and vocab > _MAX_EXACT:
        return max(params.min_p, _NEGLIGIBLE)
    return params.min_p


def at_least(
    logits: NDArray[np.float32], top: float, share: float, temperature: float
) -> NDArray[np.int64]:
    """Ids of the tokens that are at least `share` times as likely as the likeliest.

    Nguyen et al., "Turning up the heat: min-p sampling", 2024; transformers' MinPLogitsWarper.
    exp((x - top) / temperature) >= share, solved for x: needs no exponential.
    """
    return (logits >= top + temperature * math.log(share)).nonzero()[0]


def largest(values: NDArray[Any], k: int) -> NDArray[np.int64]:
    """The indices of the `k` largest values, the largest first; of ties the lower index.

    The k-th largest of the maxima of any blocks is not above the k-th largest value: k blocks at
    least have a value that large. So only what reaches it has to be looked at.
    """
    num_blocks = max(3 * k, 384)
    depth = len(values) // num_blocks
    if depth >= 8:
        # Block i is every num_blocks-th value from i on (that way numpy takes maxima fastest), of
        # a long row a part of them. A value that is in no block only lowers the bound.
        layers = values[: depth * num_blocks].reshape(depth, num_blocks)
        maxima = layers[:: 1 + depth // 32].max(axis=0)
        bound = np.partition(maxima, -k)[-k]
    else:
        bound = np.partition(values, -k)[-k] if k < len(values) else -np.inf
    indices: NDArray[np.int64] = (values >= bound).nonzero()[0]
    order: NDArray[np.int64] = (-values[indices]).argsort(kind="stable")[:k]
    ranked: NDArray[np.int64] = indices[order]
    return ranked


def exponentials(
    values: NDArray[np.float32],
    top: float,
    temperature: float,
    scratch: NDArray[np.float32] | None,
) -> NDArray[Any]:
    """exp((value - top) / temperature): probabilities but for a factor; `top` has 1. They may lie
    in `scratch`."""
    if len(values) <= _MAX_EXACT:
        return _exact_weights(values, top, temperature)
    out = None if scratch is None else scratch[: len(values)]
    scaled: NDArray[np.float32] = np.subtract(values, np.float32(top), out=out)
    if temperature != 1:
        scaled *= np.float32(1 / max(temperature, _MIN_TEMPERATURE))
    np.exp(scaled, out=scaled)
    return scaled


def block_sums(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Of each `BLOCK` weights, the last of those that are left."""
    end = len(weights) - len(weights) % BLOCK
    # einsum adds short rows three times as fast as sum.
    sums = np.einsum("ij->i", weights[:end].reshape(-1, BLOCK)).astype(np.float64)
    return sums if end == len(weights) else np.append(sums, weights[end:].sum(dtype=np.float64))


def _exact_weights(
    values: NDArray[np.float32], top: float, temperature: float
) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = values.astype(np.float64)
    weights -= top
    weights /= temperature
    np.exp(weights, out=weights)
    return weights


def _nucleus(weights: NDArray[Any], top_p: float) -> NDArray[np.int64]:
    """Indices, in rising order, of the smallest set of the likeliest whose share of the mass
    reaches `top_p`; of ties the lower indices.

    Holtzman et al., "The curious case of neural text degeneration", 2019.

    Tokens that weigh less than (1 - p) of the mean have less than 1 - p of the mass together, so
    the others hold the nucleus, and only they are sorted. Most often far fewer hold it: those that
    would be above the mean of `_FEW`.
    """
    mass = float(block_sums(weights).sum())
    target = top_p * mass
    for num_shares in (min(_FEW, len(weights)), len(weights)):
        bound = (1 - top_p) * mass / num_shares
        likely = (weights >= min(bound, 1.0)).nonzero()[0]  # 1: rounding must leave the top
        ordered = np.sort(weights[likely])[::-1]
        cumulative = ordered.cumsum(dtype=np.float64)
        if cumulative[-1] >= target:
            break
    num_kept = min(int(cumulative.searchsorted(target)) + 1, len(ordered))
    weights, edge = weights[likely], ordered[num_kept - 1]
    kept = (weights >= edge).nonzero()[0]
    if len(kept) > num_kept:
        ties = kept[weights[kept] == edge]
        kept = np.setdiff1d(kept, ties[num_kept - len(kept) :], assume_unique=True)
    nucleus: NDArray[np.int64] = likely[kept]
    return nucleus


def _inverse_cdf(weights: NDArray[Any], draw: float) -> int:
    """The first index at which the running sum exceeds `draw` times the whole sum.

    Sums of blocks first, then those within one block. A weight of 0 is never chosen.
    """
    if len(weights) <= _FEW:
        cumulative = weights.cumsum(dtype=np.float64)
        return _first_above(cumulative, draw * float(cumulative[-1]))
    cumulative = block_sums(weights).cumsum()
    target = draw * float(cumulative[-1])
    block = _first_above(cumulative, target)
    start = block * BLOCK
    before = float(cumulative[block - 1]) if block > 0 else 0.0
    within = weights[start : start + BLOCK].cumsum(dtype=np.float64)
    return start + _first_above(within, target - before)


def _first_above(cumulative: NDArray[np.float64], target: float) -> int:
    # However `target` was rounded, it must not lead behind the last weight that is not 0.
    last = math.nextafter(float(cumulative[-1]), 0.0)
    return int(cumulative.searchsorted(min(target, last), side="right"))
