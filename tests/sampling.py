"""A slow reference of sampling, written from the definitions: one row, plain loops, a full sort."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from app.sequence import Sequence

Row = list[float]


def bits(mask: np.ndarray, num_tokens: int) -> list[bool]:
    words = [int(word) for word in mask]
    return [
        id_ // 32 < len(words) and bool(words[id_ // 32] >> id_ % 32 & 1)
        for id_ in range(num_tokens)
    ]


def edited(values: Row, sequence: Sequence, mask: np.ndarray | None = None) -> Row:
    """The logits after mask, allowed and banned tokens, min_tokens, bias and penalties."""
    params = sequence.params
    permitted = [True] * len(values) if mask is None else bits(mask, len(values))
    counts = Counter(sequence.output_ids)
    seen = {*sequence.prompt_ids, *sequence.output_ids}
    result = []
    for id_, value in enumerate(values):
        is_allowed = params.allowed_token_ids is None or id_ in params.allowed_token_ids
        is_early = len(sequence.output_ids) < params.min_tokens and id_ in sequence.end_ids
        if not (permitted[id_] and is_allowed) or id_ in params.banned_token_ids or is_early:
            result.append(-math.inf)
            continue
        value += params.logit_bias.get(id_, 0.0)
        if id_ in seen:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= params.frequency_penalty * counts[id_]
        value -= params.presence_penalty * (counts[id_] > 0)
        result.append(value)
    return result


def distribution(
    values: Row, temperature: float, top_k: int, top_p: float, min_p: float, slack: float = 0.0
) -> dict[int, float]:
    """The tokens that may be drawn, with their probabilities, likeliest first.

    Min-p keeps what is at least p times as likely as the likeliest, top-k the k likeliest of
    those, top-p the smallest set of the likeliest of those whose share reaches p. `slack` widens
    all three. Equal tokens rank by their id.
    """
    top = max(values)
    ranked = sorted(range(len(values)), key=lambda id_: (-values[id_], id_))
    weights = {id_: math.exp((values[id_] - top) / temperature) for id_ in ranked}
    ranked = [id_ for id_ in ranked if weights[id_] > 0 and weights[id_] >= min_p * (1 - slack)]
    if top_k > 0:
        ranked = ranked[:top_k]
    target = math.fsum(weights[id_] for id_ in ranked) * (top_p + slack)
    kept: dict[int, float] = {}
    mass = 0.0
    for id_ in ranked:
        if top_p < 1 and mass >= target:
            break
        kept[id_] = weights[id_]
        mass += weights[id_]
    return {id_: weight / mass for id_, weight in kept.items()}
