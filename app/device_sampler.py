"""Logits on a GPU -> token ids, so that only these come back. In torch, so it runs on any device.

The rules are `sampler.sample`'s, and so are the random numbers: the same seed and step choose the
same token, but where float32 rounding decides between two. Rows that want what is not done here (a
grammar's mask, log-probabilities, a list of allowed tokens) are copied to the host and sampled
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Ordered

import numpy as np
import torch
from numpy.typing import NDArray

from .kv_cache import KVCache
from .model import OnnxModel
from .sampler import NO_MASKS, Sampled, uniform
from .sampler import sample as sample_on_host
from .sequence import SamplingParams, Sequence, StepPlan, TokenLogprobs

_MIN_TEMPERATURE = 1e-30  # float32 does not know the inverse of a much smaller number


class DeviceModel:
    """A model for an engine whose sampler is `sample`: its logits stay on the device."""

    def __init__(self, model: OnnxModel) -> None:
        self._model = model

    def forward(self, plan: StepPlan, cache: KVCache) -> torch.Tensor:
        return self._model.forward_there(plan, cache)


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    sequences: list[Sequence],
    masks: Mapping[int, NDArray[np.uint32]] = NO_MASKS,
) -> Sampled:
    """As `sampler.sample`, of logits `(rows, vocab)` on any device and of any float type.

    The host waits for the device once, and once more if rows are copied.
    """
    if not sequences:
        # A step without a token, of a prompt's chunk: the host must not run ahead of the device.
        if logits.is_cuda:
            torch.cuda.current_stream().synchronize()
        return sample_on_host(np.empty((0, 1), np.float32), [])
    values = logits.float()
    on_host = [row for row, s in enumerate(sequences) if row in masks or _needs_host(s.params)]
    copied = values[on_host].numpy(force=True) if on_host else None
    tokens = values.argmax(dim=1)  # a NaN before any number, and of ties the first
    is_finite = values.gather(1, tokens[:, None])[:, 0].isfinite()
    has_choice = torch.ones_like(is_finite)
    rest = [r for r, s in enumerate(sequences) if r not in on_host and not _is_plain(s)]
    if rest:
        rows = _place(rest, torch.int64, logits)
        chosen, possible = _choose(values[rows], [sequences[row] for row in rest])
        tokens[rows], has_choice[rows] = chosen, possible
    told = torch.stack([tokens, is_finite.long(), has_choice.long()]).numpy(force=True)
    ids, finite = told[0].copy(), told[1].astype(np.bool_)
    choice = told[2].astype(np.bool_) | ~finite  # of what is no number nobody knows
    logprobs: dict[int, TokenLogprobs] = {}
    if copied is not None:
        own_masks = {index: masks[row] for index, row in enumerate(on_host) if row in masks}
        theirs = sample_on_host(copied, [sequences[row] for row in on_host], own_masks)
        ids[on_host], choice[on_host] = theirs.token_ids, theirs.has_choice
        logprobs = {on_host[index]: found for index, found in theirs.logprobs.items()}
    return Sampled(ids, finite, choice, logprobs)


def _needs_host(params: SamplingParams) -> bool:
    return params.num_logprobs is not None or params.allowed_token_ids is not None


def _is_plain(sequence: Sequence) -> bool:
    """It takes its largest logit."""
    params = sequence.params
    return params.temperature == 0 and not (
        params.banned_token_ids
        or params.logit_bias
        or _has_penalty(params)
        or len(sequence.output_ids) < params.min_tokens
    )


def _has_penalty(params: SamplingParams) -> bool:
    off = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return off != (1, 0, 0)


def _choose(values: torch.Tensor, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """A token per row, and whether its request permits one; `values` (rows, vocab) are changed."""
    _forbid(values, sequences)
    _bias(values, sequences)
    _penalize(values, sequences)
    tokens = values.argmax(dim=1)
    tops = values.gather(1, tokens[:, None])  # (rows, 1)
    drawing = [row for row, s in enumerate(sequences) if s.params.temperature > 0]
    if drawing:
        rows = _place(drawing, torch.int64, values)
        drawn = _draw(values[rows], tops[rows], tokens[rows], [sequences[row] for row in drawing])
        tokens[rows] = drawn
    return tokens, tops[:, 0] > -torch.inf


def _forbid(values: torch.Tensor, sequences: list[Sequence]) -> None:
    entries = [
        (row, id_)
        for row, sequence in enumerate(sequences)
        for id_ in (*sequence.params.banned_token_ids, *_early_ends(sequence))
        if id_ < values.shape[1]
    ]
    if entries:
        rows, ids = _place(entries, torch.int64, values).unbind(1)
        values[rows, ids] = -torch.inf


def _early_ends(sequence: Sequence) -> frozenset[int]:
    is_early = len(sequence.output_ids) < sequence.params.min_tokens
    return sequence.end_ids if is_early else frozenset()


def _bias(values: torch.Tensor, sequences: list[Sequence]) -> None:
    entries = [
        (row, id_, bias)
        for row, sequence in enumerate(sequences)
        for id_, bias in sequence.params.logit_bias.items()
    ]
    if entries:
        rows, ids, bias = _place(entries, torch.float64, values).unbind(1)
        values.index_put_((rows.long(), ids.long()), bias.float(), accumulate=True)


def _penalize(values: torch.Tensor, sequences: list[Sequence]) -> None:
    """Formulas and order are `edits.Edits`'s."""
    entries = [
        (row, id_, params.repetition_penalty, _subtracted(params, count))
        for row, sequence in enumerate(sequences)
        if _has_penalty(params := sequence.params)
        for id_, count in _seen(sequence).items()
    ]
    if not entries:
        return
    rows, ids, factors, less = _place(entries, torch.float64, values).unbind(1)
    place = (rows.long(), ids.long())
    old = values[place]
    new = torch.where(old < 0, old.double() * factors, old.double() / factors) - less
    # A penalty must not make an infinity, nor forbid a token.
    largest = torch.finfo(torch.float32).max
    values[place] = torch.where(old.isfinite(), new.clamp(-largest, largest).float(), old)


def _subtracted(params: SamplingParams, count: int) -> float:
    return params.frequency_penalty * count + params.presence_penalty * (count > 0)


class _Seen(Counter[int]):
    """How often each id came in the answer; those that only the prompt has count 0."""

    num_outputs = 0  # counted so far


def _seen(sequence: Sequence) -> _Seen:
    seen = sequence.sampler_state
    if not isinstance(seen, _Seen):
        seen = sequence.sampler_state = _Seen()
        if sequence.params.repetition_penalty != 1:
            seen.update(dict.fromkeys(sequence.prompt_ids, 0))
    seen.update(sequence.output_ids[seen.num_outputs :])
    seen.num_outputs = len(sequence.output_ids)
    return seen


def _draw(
    values: torch.Tensor, tops: torch.Tensor, tokens: torch.Tensor, sequences: list[Sequence]
) -> torch.Tensor:
    """The token at each row's share of the mass of its candidates, counted by rising id.

    `tops` (rows, 1) are the largest of `values` (rows, vocab), at `tokens` (rows,).
    """
    params = [sequence.params for sequence in sequences]
    draws = [uniform(s.params.seed, step=len(s.output_ids)) for s in sequences]
    temperatures = [max(p.temperature, _MIN_TEMPERATURE) for p in params]
    columns = [draws, temperatures, [p.min_p for p in params], [p.top_p for p in params]]
    draw, temperature, min_p, top_p = _place(columns, torch.float64, values)[:, :, None]
    weights = ((values - tops) * (1 / temperature).float()).exp()
    if any(p.min_p > 0 for p in params):
        # exp((x - top) / temperature) >= min_p, solved for x; log 0 keeps everything.
        weights *= values >= (tops + temperature * min_p.log()).float()
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        top_k = _place([p.top_k or values.shape[1] for p in params], torch.int64, values)
        weights = _likeliest(weights, values, top_k[:, None], top_p)
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    target = draw * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).clamp(max=values.shape[1] - 1)
    # However sums were rounded, what is not left is not drawn.
    is_left = weights.gather(1, drawn) > 0
    return torch.where(is_left[:, 0], drawn[:, 0], tokens)


def _likeliest(
    weights: torch.Tensor, values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """`weights`, 0 for what top-k and then top-p leave out; of ties the lower ids stay.

    Tokens are ranked by their logits: weights that differ may be equal when they are rounded.
    """
    order = values.argsort(dim=1, descending=True, stable=True)
    ranks = torch.arange(values.shape[1], device=values.device)
    ranked = weights.gather(1, order) * (ranks < top_k)
    cumulative = ranked.cumsum(dim=1, dtype=torch.float64)
    # A token stays if those before it do not reach the share; 1 leaves all.
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    ranked *= (before < top_p * cumulative[:, -1:]) | (top_p >= 1)
    return torch.zeros_like(weights).scatter_(1, order, ranked)


def _place(numbers: Ordered[object], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor
