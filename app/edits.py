"""What a request's parameters and its grammar do to a row of logits before a token is chosen:
tokens are forbidden, biased, or penalized for having come before. Greedy choices feel it, too.

The order is vLLM's (v1/sample/sampler.py): what is forbidden, then bias, then the penalties. A
forbidden token is at minus infinity, which nothing later brings back.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from .sequence import SamplingParams, Sequence

Logits = NDArray[np.float32]  # (vocab,)
Mask = NDArray[np.uint32]

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
    is new in it, not what is long in the request."""

    def __init__(self, params: SamplingParams) -> None:
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else _ids(allowed)
        self._banned = _ids(params.banned_token_ids)
        self._biased = _ids(params.logit_bias)
        self._bias = np.array([*params.logit_bias.values()], np.float32)
        self._params = params
        self._seen = _Seen() if _has_penalty(params) else None
        self._is_needed = (
            allowed is not None
            or len(self._banned) + len(self._biased) > 0
            or self._seen is not None
        )

    @property
    def are_never_needed(self) -> bool:
        """But for a mask."""
        return not self._is_needed and self._params.min_tokens == 0

    def are_needed(self, sequence: Sequence) -> bool:
        """Do they change the next row, even without a mask?"""
        return self._is_needed or self._is_short(sequence)

    def _is_short(self, sequence: Sequence) -> bool:
        """No end token may come yet."""
        least = self._params.min_tokens
        return least > 0 and len(sequence.output_ids) < least and bool(sequence.end_ids)

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
        if len(self._banned):
            scratch[self._banned] = -np.inf
        if self._is_short(sequence):
            scratch[[id_ for id_ in sequence.end_ids if id_ < len(scratch)]] = -np.inf
        if len(self._biased):
            scratch[self._biased] += self._bias
        if self._seen is not None:
            self._seen.update(sequence)
            ids = self._seen.ids
            scratch[ids] = self._seen.penalized(scratch[ids], self._params)
        return scratch


class _Seen:
    """The ids of a sequence, each once, and how often each of them came in the answer: those that
    only the prompt has count 0. The prompt is left out if no penalty asks for it."""

    def __init__(self) -> None:
        self._ids = array("q")
        self._counts = array("d")  # float64, as it is calculated with
        self._places: dict[int, int] = {}
        self._num_outputs = -1  # counted so far; -1: nor is the prompt

    def update(self, sequence: Sequence) -> None:
        if self._num_outputs < 0:
            self._num_outputs = 0
            if sequence.params.repetition_penalty != 1:
                self._ids = array("q", dict.fromkeys(sequence.prompt_ids))
                self._counts = array("d", bytes(8 * len(self._ids)))
                self._places = {id_: place for place, id_ in enumerate(self._ids)}
        for id_ in sequence.output_ids[self._num_outputs :]:
            place = self._places.setdefault(id_, len(self._ids))
            if place == len(self._ids):
                self._ids.append(id_)
                self._counts.append(0)
            self._counts[place] += 1
        self._num_outputs = len(sequence.output_ids)

    @property
    def ids(self) -> NDArray[np.int64]:
        return np.frombuffer(self._ids, np.int64)

    def penalized(self, logits: Logits, params: SamplingParams) -> NDArray[np.float64]:
        """What the logits of `ids` become.

        Repetition: Keskar et al., "CTRL", 2019, of the prompt's and the answer's tokens, as in
        transformers' RepetitionPenaltyLogitsProcessor: a positive logit is divided by the penalty,
        a negative one multiplied.

        Frequency and presence: OpenAI's formula (API reference, "Frequency and presence
        penalties"), of the answer's tokens only, as in vLLM: logit - count * frequency_penalty
        - (count > 0) * presence_penalty.
        """
        values = logits.astype(np.float64)
        if (penalty := params.repetition_penalty) != 1:
            values = np.where(values < 0, values * penalty, values / penalty)
        if params.frequency_penalty:
            values -= params.frequency_penalty * np.frombuffer(self._counts, np.float64)
        if params.presence_penalty:
            values -= params.presence_penalty * (np.frombuffer(self._counts, np.float64) > 0)
        # A penalty must not make an infinity, nor forbid a token.
        if np.abs(values).max(initial=0) > _LARGEST:
            values = np.where(np.isfinite(logits), np.clip(values, -_LARGEST, _LARGEST), values)
        return values


def _has_penalty(params: SamplingParams) -> bool:
    off = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return off != (1, 0, 0)


def _ids(ids: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(ids, np.int64, len(ids))


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
