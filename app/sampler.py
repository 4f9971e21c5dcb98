"""Logits -> token ids, in numpy. A row's choice depends on its own logits, parameters, seed and
number of tokens so far, never on its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from .candidates import draw_token
from .edits import edit
from .logprobs import log_probabilities
from .sequence import Sequence, TokenLogprobs

NO_MASKS: Mapping[int, NDArray[np.uint32]] = MappingProxyType({})


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

    The order is vLLM's (v1/sample/sampler.py): log-probabilities of the raw logits; what is
    forbidden, bias and penalties (`edits`); at temperature 0 then the largest, of ties the lowest
    id; else temperature, min-p, top-k, top-p, and a draw (`candidates`).

    `masks` holds of some rows a bit per token, the lowest of each word first: 1 if the row's
    grammar permits it.

    A row with a NaN or +inf, or of -inf only, is marked not finite, one whose request leaves no
    token as without a choice; the token of such a row is meaningless. The other rows are not
    affected. Only rows that ask for more than the largest logit cost more than finding it.
    """
    token_ids = logits.argmax(axis=1)
    # argmax finds a NaN before any number, so the maximum tells for the whole row.
    is_finite = np.isfinite(logits[np.arange(len(sequences)), token_ids])
    has_choice = np.ones(len(sequences), np.bool_)
    logprobs: dict[int, TokenLogprobs] = {}
    # Overflows are meant: a tiny temperature sends all but the largest to -inf.
    with np.errstate(over="ignore", under="ignore"):
        for row in np.flatnonzero(is_finite).tolist():
            sequence = sequences[row]
            raw, params = logits[row], sequence.params
            edited = edit(raw, sequence, masks.get(row))
            if edited is not raw:
                token_ids[row] = edited.argmax()
                has_choice[row] = edited[token_ids[row]] > -np.inf
            if not has_choice[row]:
                continue
            if params.temperature > 0:
                draw = uniform(params.seed, step=len(sequence.output_ids))
                token_ids[row] = draw_token(edited, params, draw)
            if params.num_logprobs is not None:
                chosen = int(token_ids[row])
                logprobs[row] = log_probabilities(raw, chosen, params.num_logprobs)
    return Sampled(token_ids, is_finite, has_choice, logprobs)


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) fixed by `seed` and `step`.

    Philox is a counter-based generator (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", 2011): any element of a seed's stream is had without drawing those before it.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=step)).random())
