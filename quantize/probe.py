"""A question and its answer for the folder: the server asks it again, on its own machine.

8-bit kernels differ from CPU to CPU, and those without VNNI saturate; text comes out all the same,
only wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from .decoding import Decoding
from .errors import QuantizeError

_TEXT = "The quick brown fox jumps over the lazy dog, and 3 + 4 = 7."
_NUM_TOKENS = 24
_NUM_LOGITS = 8
# Of the distance between the largest logit and the mean. Other kernels round elsewhere, and a
# rounded activation is off by a whole step: read token by token instead of in one run, the default
# model differs by 0.010 (int8) and 0.017 (int4).
_TOLERANCE = 0.1


def make_probe(folder: Path, tokenizer: PreTrainedTokenizerBase, context: int) -> dict[str, Any]:
    """Reads a text with the graph in `folder`, in one run; its largest logits behind it."""
    num_tokens = min(_NUM_TOKENS, context)
    ids = tokenizer.encode(_TEXT, add_special_tokens=False)[:num_tokens]
    logits = Decoding(folder, 1, len(ids)).feed(np.array([ids], np.int64))[0].astype(np.float64)
    if not np.isfinite(logits).all():
        raise QuantizeError("the graph gives NaN or infinite logits for a plain English text")
    top = np.argsort(-logits, kind="stable")[:_NUM_LOGITS]
    return {
        "token_ids": ids,
        "top_ids": top.tolist(),
        "top_logits": logits[top].round(4).tolist(),
        "max_difference": round(max(_TOLERANCE * float(logits[top[0]] - logits.mean()), 1e-3), 4),
    }
