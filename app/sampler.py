"""Logits -> token ids, in numpy. A row's choice depends on its own logits, parameters, seed and
number of tokens so far, never on its neighbours."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .candidates import draw_token
from .edits import edits_of
from .logprobs import log_probabilities
from .sequence import Sequence, TokenLogprobs

_STEPS_AT_ONCE = 16
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
    tops = logits[np.arange(len(sequences)), token_ids]
    is_finite = np.isfinite(tops)
    has_choice = np.ones(len(sequences), np.bool_)
    logprobs: dict[int, TokenLogprobs] = {}
    # One row each, for all rows: fresh memory costs as much as what is done with it.
    edited_row, work_row = np.empty((2, logits.shape[1]), np.float32)
    # Overflows are meant: a tiny temperature sends all but the largest to -inf.
    with np.errstate(over="ignore", under="ignore"):
        for row in is_finite.nonzero()[0].tolist():
            if sequences[row].is_greedy and row not in masks:
                continue
            sequence, params = sequences[row], sequences[row].params
            edits, mask = edits_of(sequence), masks.get(row)
            if mask is None and params.is_plain and not edits.are_needed(sequence):
                continue  # the largest logit it is
            raw, token_id, top = logits[row], int(token_ids[row]), float(tops[row])
            edited = edits.apply(raw, sequence, mask, edited_row)
            if edited is not raw:
                token_id = int(edited.argmax())
                top = float(edited[token_id])
                has_choice[row] = top > -np.inf
            if has_choice[row] and params.temperature > 0:
                draw = uniform(params.seed, step=len(sequence.output_ids))
                token_id = draw_token(edited, top, params, draw, work_row)
            token_ids[row] = token_id
            if has_choice[row] and (number := params.num_logprobs) is not None:
                logprobs[row] = log_probabilities(raw, float(tops[row]), token_id, number, work_row)
    return Sampled(token_ids, is_finite, has_choice, logprobs)


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) fixed by `seed` and `step`: the first of numpy's
    `Generator(Philox(key=seed, counter=step))`.

    Philox is a counter-based generator (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", 2011): any element of a seed's stream is had without drawing those before it.
    """
    first = step - step % _STEPS_AT_ONCE
    return _numbers(seed, first)[step - first]


@lru_cache(maxsize=1024)
def _numbers(seed: int, first_step: int) -> list[float]:
    """Of `_STEPS_AT_ONCE` steps, for to start a stream anywhere takes as long as to add up a row.
    Each step of the counter has four numbers."""
    return _streams.numbers(seed, first_step, 4 * _STEPS_AT_ONCE)[::4]


class _Streams(threading.local):
    """One generator per thread: to make one takes numpy ten times as long as to set its state."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._state: Any = self._philox.state  # with an empty buffer

    def numbers(self, seed: int, step: int, count: int) -> list[float]:
        self._state["state"]["key"][:] = (seed, 0)
        self._state["state"]["counter"][:] = (step, 0, 0, 0)
        self._philox.state = self._state
        numbers: list[float] = self._generator.random(count).tolist()
        return numbers


_streams = _Streams()
