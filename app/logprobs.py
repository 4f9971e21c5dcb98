"""Log-probabilities of one row: the model's own, whatever the request's parameters make of them.

At most `num_logprobs` pairs of a token are kept (FR19), never an array.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .candidates import largest
from .sequence import TokenLogprobs


def log_probabilities(logits: NDArray[np.float32], chosen: int, num_logprobs: int) -> TokenLogprobs:
    """Natural log-softmax of the finite row `logits`, shape (vocab,): of `chosen`, and of the
    `num_logprobs` likeliest, of ties the lower ids.

    Tokens of probability 0 are not among the likeliest, so there may be fewer.
    """
    top = float(logits.max())
    scaled = logits - np.float32(top)
    # float32 adds pairwise: the sum of a vocabulary is right to some 1e-7.
    log_sum = top + math.log(float(np.exp(scaled, out=scaled).sum()))
    ids = largest(logits, num_logprobs) if num_logprobs > 0 else np.empty(0, np.int64)
    values = logits[ids]
    order = np.argsort(-values, kind="stable")
    pairs = zip(ids[order].tolist(), values[order].tolist(), strict=True)
    likeliest = tuple((id_, value - log_sum) for id_, value in pairs if value > -math.inf)
    return TokenLogprobs(float(logits[chosen]) - log_sum, likeliest)
