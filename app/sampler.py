"""Logits -> token ids, in numpy. A row's choice depends on its own logits, parameters, seed and
number of tokens so far, never on its neighbours."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .candidates import draw_token
from .draws import draw_tokens
from .edits import Overlay, edits_of
from .logprobs import log_probabilities
from .sequence import Sequence, TokenLogprobs

_STEPS_AT_ONCE = 16
Row = tuple[int, Sequence]
NO_MASKS: Mapping[int, NDArray[np.uint32]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry per row of logits: the chosen token, and whether the row could be trusted."""

    token_ids: NDArray[np.int64]  # (rows,)
    is_finite: NDArray[np.bool_]  # (rows,), the model's logits are numbers
    has_choice: NDArray[np.bool_]  # (rows,), the request permits a token at least
    logprobs: dict[int, TokenLogprobs]  # of the rows that asked for them


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
    affected. Only rows that ask for more than the largest logit cost more than finding it. `logits`
    are written to meanwhile, if they can be, and are as before in the end.
    """
    rows = _sorted(sequences, masks)
    if (rows.edited or rows.drawn) and not (logits.flags.c_contiguous and logits.flags.writeable):
        logits = logits.copy()
    # Overflows are meant: a tiny temperature sends all but the largest to -inf.
    with np.errstate(over="ignore", under="ignore"):
        overlay = Overlay(logits, rows.edited) if rows.edited else None
        try:
            sampled = _choose(logits, rows.drawn, overlay)
        finally:
            if overlay is not None:
                overlay.lift()
        if rows.walled or rows.told:
            _finish(logits, rows, masks, sampled)
    return sampled


class _Rows(NamedTuple):
    """Which rows want more than the largest logit, with their sequences."""

    edited: list[Row]  # a few tokens each
    walled: list[Row]  # a mask, or allowed tokens: these change the whole row
    drawn: list[Row]  # at random, and not walled
    told: list[Row]  # with log-probabilities


def _sorted(sequences: list[Sequence], masks: Mapping[int, NDArray[np.uint32]]) -> _Rows:
    rows = _Rows([], [], [], [])
    for row, sequence in enumerate(sequences):
        if sequence.is_greedy and row not in masks:
            continue
        edits, params = edits_of(sequence), sequence.params
        if row in masks or edits.has_allowed:
            rows.walled.append((row, sequence))
        else:
            if edits.are_needed(sequence):
                rows.edited.append((row, sequence))
            if params.temperature > 0:
                rows.drawn.append((row, sequence))
        if params.num_logprobs is not None:
            rows.told.append((row, sequence))
    return rows


def _choose(logits: NDArray[np.float32], drawn: list[Row], overlay: Overlay | None) -> Sampled:
    """For all but walled rows. What the overlay hides belongs to the model's logits, too."""
    token_ids = logits.argmax(axis=1)
    # argmax finds a NaN before any number, so the maximum tells for the whole row.
    tops = logits[np.arange(len(logits)), token_ids]
    raw_tops = tops
    if overlay is not None:
        raw_tops = tops.copy()
        raw_tops[overlay.rows] = np.maximum(tops[overlay.rows], overlay.largest_before)
    is_finite = np.isfinite(raw_tops)
    has_choice = (tops > -np.inf) | ~is_finite
    can_draw = (is_finite & has_choice).tolist()
    drawn = [(row, sequence) for row, sequence in drawn if can_draw[row]]
    if drawn:
        rows = np.array([row for row, _ in drawn])
        draws = np.array([uniform(each.params.seed, len(each.output_ids)) for _, each in drawn])
        params = [sequence.params for _, sequence in drawn]
        token_ids[rows] = draw_tokens(logits, rows, tops[rows], params, draws)
    return Sampled(token_ids, is_finite, has_choice, {})


def _finish(
    logits: NDArray[np.float32],
    rows: _Rows,
    masks: Mapping[int, NDArray[np.uint32]],
    sampled: Sampled,
) -> None:
    """Tokens of walled rows, and the log-probabilities of all, in place."""
    # One row each, for all rows: fresh memory costs as much as what is done with it.
    edited_row, work_row = np.empty((2, logits.shape[1]), np.float32)
    for row, sequence in rows.walled:
        if not sampled.is_finite[row]:
            continue
        params = sequence.params
        edited = edits_of(sequence).apply(logits[row], sequence, masks.get(row), edited_row)
        token_id = int(edited.argmax())
        top = float(edited[token_id])
        sampled.has_choice[row] = top > -np.inf
        if sampled.has_choice[row] and params.temperature > 0:
            draw = uniform(params.seed, step=len(sequence.output_ids))
            token_id = draw_token(edited, top, params, draw, work_row)
        sampled.token_ids[row] = token_id
    for row, sequence in rows.told:
        if sampled.is_finite[row] and sampled.has_choice[row]:
            raw, number = logits[row], sequence.params.num_logprobs
            chosen, top = int(sampled.token_ids[row]), float(raw.max())
            assert number is not None
            sampled.logprobs[row] = log_probabilities(raw, top, chosen, number, work_row)


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
