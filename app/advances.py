"""What a step brings a sequence: a token, and whether the answer ends with it; or its failure."""

from __future__ import annotations

from .repetition import extend_runs, num_repeats
from .sequence import Advance, Constraint, FinishReason, Sequence, TokenLogprobs

_NOT_FINITE = (
    "the model's logits are not finite for this request (an overflow in fp16, or broken weights)"
)
_NO_CHOICE = "no token is left that this request's grammar or its allowed tokens permit"


def append(sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> Advance:
    """The answer goes on with `token_id`."""
    output_ids = sequence.output_ids
    output_ids.append(token_id)
    params = sequence.params
    is_looping = params.repetition_guard and _repeats(sequence)  # each token has to be counted
    constraint = sequence.constraint
    is_complete = constraint is not None and _completes(constraint, token_id)
    reason = None
    if is_complete or token_id in sequence.end_ids:
        reason = FinishReason.STOP
    elif is_looping and len(output_ids) >= params.min_tokens:
        reason = FinishReason.REPETITION
    elif len(output_ids) >= sequence.max_output:
        reason = FinishReason.LENGTH
    if reason is not None:
        sequence.finish(reason)
    return Advance(sequence, token_id, reason, None, logprobs)


def not_finite(sequence: Sequence) -> Advance:
    return failed(sequence, _NOT_FINITE)


def no_choice(sequence: Sequence) -> Advance:
    error = sequence.constraint.error if sequence.constraint is not None else None
    why = _NO_CHOICE if error is None else f"this request's grammar cannot be followed: {error}"
    return failed(sequence, why, FinishReason.DEAD_END)


def failed(sequence: Sequence, error: str, reason: FinishReason = FinishReason.ERROR) -> Advance:
    sequence.finish(reason, error)
    return Advance(sequence, None, reason, error)


def _completes(constraint: Constraint, token_id: int) -> bool:
    constraint.accept(token_id)
    return constraint.is_complete


def _repeats(sequence: Sequence) -> bool:
    sequence.runs = extend_runs(sequence.runs, sequence.output_ids)
    return num_repeats(sequence.runs) >= sequence.params.repetition_guard
