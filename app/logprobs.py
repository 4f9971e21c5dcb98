"""Log-probabilities of one row: the model's own, whatever the request's parameters make of them.

At most `num_logprobs` pairs of a token are kept (FR19), never an array.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .candidates import block_sums, exponentials, largest
from .sequence import TokenLogprobs


def log_probabilities(
    logits: NDArray[np.float32],
    top: float,
    chosen: int,
    num_logprobs: int,
    scratch: NDArray[np.float32] | None = None,
) -> TokenLogprobs:
    """Natural log-softmax of `logits`, shape (vocab,), whose largest is `top`, finite: of `chosen`,
    and of the `num_logprobs` likeliest, of ties the lower ids.

    Tokens of probability 0 are not among the likeliest, so there may be fewer. `scratch`, of the
    same shape, is overwritten.
    """
    log_sum = top + math.log(float(block_sums(exponentials(logits, top, 1, scratch)).sum()))
    likeliest: tuple[tuple[int, float], ...] = ()
    if num_logprobs > 0:
        ids = largest(logits, num_logprobs)
        pairs = zip(ids.tolist(), logits[ids].tolist(), strict=True)
        likeliest = tuple((id_, value - log_sum) for id_, value in pairs if value > -math.inf)
    return TokenLogprobs(float(logits[chosen]) - log_sum, likeliest)
