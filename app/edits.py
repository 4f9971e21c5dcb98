"""What a request's parameters and its grammar do to a row of logits before a token is chosen:
tokens are forbidden, biased, or penalized for having come before. Greedy choices feel it, too.

The order is vLLM's (v1/sample/sampler.py): what is forbidden, then bias, then the penalties. A
forbidden token is at minus infinity, which nothing brings back.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .sequence import SamplingParams, Sequence

Logits = NDArray[np.float32]  # (vocab,)
Mask = NDArray[np.uint32]
Columns = NDArray[np.float64]  # (facts, tokens)
_NUM_FACTS = 6
_ID, _BIAS, _NUMBER, _IS_SEEN, _IS_BANNED, _IS_END = range(_NUM_FACTS)
_ROOM = 64  # columns for tokens to come

_LARGEST = float(np.finfo(np.float32).max)
# For each byte of a mask what it adds to its 8 tokens: 0 or minus infinity.
_ADDENDS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0, -np.inf).astype(np.float32)


def edits_of(sequence: Sequence) -> Edits:
    """The sequence's own, made at its first step."""
    edits = sequence.sampler_state
    if not isinstance(edits, Edits):
        edits = sequence.sampler_state = Edits(sequence.params)
        sequence.is_greedy = sequence.params.is_plain and edits.are_never_needed
    return edits


class Edits:
    """A sequence's parameters as arrays, and which tokens it has seen how often. A step costs what
    is new in it, not what is long in the request.

    Of each token that may change, once, a column: its id, bias, number in the answer, and whether
    it has come (in the prompt too, if a penalty asks for it), is banned, is an end.
    """

    def __init__(self, params: SamplingParams) -> None:
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else np.fromiter(allowed, np.int64, len(allowed))
        self._params = params
        self._has_penalty = _has_penalty(params)
        self._is_needed = (
            allowed is not None
            or len(params.banned_token_ids) + len(params.logit_bias) > 0
            or self._has_penalty
        )
        self._table: Columns | None = None
        self._places: dict[int, int] = {}
        self._num_outputs = 0  # counted so far

    @property
    def are_never_needed(self) -> bool:
        """But for a mask."""
        return not self._is_needed and self._params.min_tokens == 0

    @property
    def has_allowed(self) -> bool:
        """Only some tokens may come: that changes the whole row."""
        return self._allowed is not None

    def are_needed(self, sequence: Sequence) -> bool:
        """Do they change the next row, even without a mask?"""
        return self._is_needed or self.is_short(sequence)

    def is_short(self, sequence: Sequence) -> bool:
        """No end token may come yet."""
        least = self._params.min_tokens
        return least > 0 and len(sequence.output_ids) < least and bool(sequence.end_ids)

    def factors(self, sequence: Sequence) -> tuple[float, float, float, float]:
        """What `changed` wants to know beside the columns."""
        params = self._params
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        return (*penalties, float(self.is_short(sequence)))

    def apply(
        self, logits: Logits, sequence: Sequence, mask: Mask | None, scratch: Logits
    ) -> Logits:
        """The row as the request wants it: `logits` itself if there is nothing to do, else
        `scratch`, filled.

        Bit i of word w of `mask`, the lowest first, permits token 32 w + i; tokens behind its end
        are forbidden.
        """
        if mask is None and not self.are_needed(sequence):
            return logits
        if mask is None:
            np.copyto(scratch, logits)
        else:
            _forbid_unmasked(logits, mask, scratch)
        if self._allowed is not None:
            kept = scratch[self._allowed]
            scratch.fill(-np.inf)
            scratch[self._allowed] = kept
        columns = self.columns(sequence, len(scratch))
        ids = columns[_ID].astype(np.int64)
        factors = np.array(self.factors(sequence))[:, None]
        scratch[ids] = changed(scratch[ids], columns, factors)
        return scratch

    def columns(self, sequence: Sequence, vocab: int) -> Columns:
        """As they are for the next row."""
        if self._table is None:
            self._table = self._first_columns(sequence, vocab)
        if self._has_penalty:
            for id_ in sequence.output_ids[self._num_outputs :]:
                self._count(id_)
            self._num_outputs = len(sequence.output_ids)
        return self._table[:, : len(self._places)]

    def _first_columns(self, sequence: Sequence, vocab: int) -> Columns:
        params = self._params
        prompt_ids = sequence.prompt_ids if params.repetition_penalty != 1 else []
        end_ids = [id_ for id_ in sequence.end_ids if id_ < vocab] if params.min_tokens else []
        ids = dict.fromkeys([*params.logit_bias, *params.banned_token_ids, *end_ids, *prompt_ids])
        self._places = dict(zip(ids, range(len(ids)), strict=True))
        table = np.zeros((_NUM_FACTS, len(ids) + _ROOM))
        table[_ID, : len(ids)] = [*ids]
        table[_BIAS, : len(params.logit_bias)] = np.array([*params.logit_bias.values()], np.float32)
        facts = (_IS_SEEN, prompt_ids), (_IS_BANNED, params.banned_token_ids), (_IS_END, end_ids)
        for fact, members in facts:
            table[fact, [self._places[id_] for id_ in members]] = 1
        return table

    def _count(self, id_: int) -> None:
        assert self._table is not None
        place = self._places.setdefault(id_, len(self._places))
        if place == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        self._table[_ID, place] = id_
        self._table[_NUMBER, place] += 1
        self._table[_IS_SEEN, place] = 1


def changed(logits: Logits, columns: Columns, factors: NDArray[np.float64]) -> Logits:
    """What `logits` become, shape (tokens,), with their `columns` and the `factors` of the sequence
    of each, or of the only one.

    Repetition: Keskar et al., "CTRL", 2019, of the prompt's and the answer's tokens, as in
    transformers' RepetitionPenaltyLogitsProcessor: a positive logit is divided by the penalty,
    a negative one multiplied.

    Frequency and presence: OpenAI's formula (API reference, "Frequency and presence penalties"),
    of the answer's tokens only, as in vLLM: logit - count * frequency_penalty
    - (count > 0) * presence_penalty.
    """
    repetition, frequency, presence, is_short = factors
    biased = logits + columns[_BIAS].astype(np.float32)
    values = biased.astype(np.float64)
    penalized = np.where(values < 0, values * repetition, values / repetition)
    values = np.where(columns[_IS_SEEN] > 0, penalized, values)
    numbers = columns[_NUMBER]
    values -= frequency * numbers
    values -= presence * (numbers > 0)
    # A penalty must not make an infinity, nor forbid a token.
    if not (np.abs(values) <= _LARGEST).all():
        values = np.where(np.isfinite(biased), np.clip(values, -_LARGEST, _LARGEST), values)
    values[(columns[_IS_BANNED] + columns[_IS_END] * is_short) > 0] = -np.inf
    edited: Logits = values.astype(np.float32)
    return edited


class Overlay:
    """Rows of `logits` with their sequences' edits written in place, a few tokens of each, until
    `lift` puts back what was there. No sequence has `allowed_token_ids`."""

    def __init__(self, logits: NDArray[np.float32], edited: list[tuple[int, Sequence]]) -> None:
        vocab = logits.shape[1]
        self._flat = logits.reshape(-1)
        columns = [edits_of(each).columns(each, vocab) for _, each in edited]
        sizes = np.array([part.shape[1] for part in columns])
        self.rows = np.array([row for row, _ in edited])[sizes > 0]
        self._starts = (sizes.cumsum() - sizes)[sizes > 0]
        table = np.concatenate(columns, axis=1)
        factors = np.array([edits_of(each).factors(each) for _, each in edited]).T
        self._places = table[_ID].astype(np.int64)
        self._places += np.repeat([row * vocab for row, _ in edited], sizes)
        self._before = self._flat[self._places]
        values = changed(self._before, table, np.repeat(factors, sizes, axis=1))
        self._flat[self._places] = values

    @property
    def largest_before(self) -> NDArray[np.float32]:
        """Of each of `rows`, among the tokens that were written over."""
        return np.maximum.reduceat(self._before, self._starts)

    def lift(self) -> None:
        self._flat[self._places] = self._before


def _has_penalty(params: SamplingParams) -> bool:
    off = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return off != (1, 0, 0)


def _forbid_unmasked(logits: Logits, mask: Mask, edited: Logits) -> None:
    """`logits` of what `mask` permits, and minus infinity, into `edited`."""
    num_bytes = min(4 * len(mask), len(logits) // 8)
    octets = mask.astype("<u4", copy=False).view(np.uint8)
    end = 8 * num_bytes
    # 8 tokens at a time; to write through a mask of booleans takes numpy twenty times as long.
    _ADDENDS.take(octets[:num_bytes], axis=0, out=edited[:end].reshape(-1, 8), mode="clip")
    edited[:end] += logits[:end]
    edited[end:] = -np.inf
    for id_ in range(end, min(len(logits), 32 * len(mask))):
        if octets[id_ // 8] >> id_ % 8 & 1:
            edited[id_] = logits[id_]
