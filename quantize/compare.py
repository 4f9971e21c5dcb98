"""Does a quantized graph still say what the unquantized graph says?

Both read a text that ships with the project (public-domain English and Chinese, and code of our
own), in 16 rows, and their next-token distributions are compared at every position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from .decoding import Decoding
from .floor import Quality
from .reference import Reference

TEXTS = Path(__file__).parent / "gate_text"
NUM_ROWS = 16
Logits = NDArray[np.float32]


def gate_ids(tokenizer: PreTrainedTokenizerBase, max_len: int) -> NDArray[np.int64]:
    """The shipped text as (NUM_ROWS, tokens), each row a part of it, `max_len` long at most.

    Rows begin at even distances, so that short ones see every language, too.
    """
    ids: list[int] = []
    for path in sorted(TEXTS.glob("*.txt")):
        ids += tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
    width = min(len(ids) // NUM_ROWS, max_len)
    starts = np.linspace(0, len(ids) - width, NUM_ROWS).round().astype(np.int64)
    return np.array([ids[start : start + width] for start in starts], np.int64)


def compare(
    reference: Path,
    candidate: Path,
    ids: NDArray[np.int64],  # (rows, tokens)
    on_progress: Callable[[float], object] = lambda _: None,
) -> Quality:
    """The unquantized graph reads `ids` at once, the quantized one token by token, as it decodes.

    `on_progress` hears the share of the work that is done.
    """
    rows, num_tokens = ids.shape
    theirs = Reference(reference, ids, lambda share: on_progress(share / 2))
    ours = Decoding(candidate, rows, num_tokens, is_alone=False)

    def pairs() -> Iterator[tuple[Logits, Logits]]:
        for column in range(num_tokens - 1):
            yield theirs.logits(column), ours.feed(ids[:, column : column + 1])
            on_progress(0.5 + 0.5 * (column + 1) / (num_tokens - 1))

    return quality_of(pairs(), ids)


def quality_of(pairs: Iterable[tuple[Logits, Logits]], ids: NDArray[np.int64]) -> Quality:
    """Of the second of each pair, measured by the first: the logits, (rows, vocab), that two graphs
    have behind one column of `ids` after the other, but the last."""
    kl = nll = reference_nll = 0.0
    agreed = 0
    each = np.arange(len(ids))
    for (reference, found), following in zip(pairs, ids.T[1:], strict=True):
        p, q = _log_softmax(reference), _log_softmax(found)
        kl += float((p.exp() * (p - q)).sum())
        nll -= float(q[each, following].sum())
        reference_nll -= float(p[each, following].sum())
        agreed += int((p.argmax(1) == q.argmax(1)).sum())
    total = len(ids) * (ids.shape[1] - 1)
    return Quality(
        num_tokens=total,
        perplexity=_perplexity(nll / total),
        reference_perplexity=_perplexity(reference_nll / total),
        mean_kl=kl / total,
        top1_agreement=agreed / total,
    )


def _perplexity(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf  # beyond, exp overflows


def _log_softmax(logits: NDArray[np.float32]) -> torch.Tensor:
    return torch.log_softmax(torch.from_numpy(logits), dim=1)
