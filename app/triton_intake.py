"""From a Triton request to a sequence of the engine, or to an error that names the input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InvalidRequest
from .generate_requests import DEFAULT_MAX_TOKENS
from .limits import check_min_tokens, check_structure, check_token_ids, resolve_max_tokens
from .sequence import Constraint, Sequence

if TYPE_CHECKING:
    from .loading import LoadedModel
    from .triton_requests import TritonRequest


def make_sequence(
    asked: TritonRequest, model: LoadedModel, request_id: str, arrived_at: float
) -> Sequence:
    """Raises InvalidRequest, as `/generate` does, for what the model cannot do."""
    check_token_ids(asked, model.vocab_size)
    constraint = _constraint(asked, model)
    prompt_ids = model.codec.encode(asked.prompt, parse_special=bool(asked.parse_special))
    max_tokens = resolve_max_tokens(
        *(asked.max_tokens, DEFAULT_MAX_TOKENS, len(prompt_ids), model.max_model_len),
        prompt_field="text_input",
    )
    check_min_tokens(asked.min_tokens, max_tokens)
    return Sequence(
        *(request_id, prompt_ids, asked.params(max_tokens, None)),
        constraint=constraint,
        arrived_at=arrived_at,
        priority=asked.priority or 0,
    )


def _constraint(asked: TritonRequest, model: LoadedModel) -> Constraint | None:
    structure, grammars = asked.structure(), model.grammars
    if structure is None:
        return None
    check_structure(asked, structure.field, is_free=structure.is_free)
    if grammars is None:
        raise InvalidRequest(
            f"{structure.field}: answers cannot be held to a form with this model's tokenizer",
            param=structure.field,
        )
    compilers = {
        "json_schema": grammars.json_schema,
        "regex": grammars.regex,
        "lark": grammars.lark,
    }
    return compilers[structure.kind](structure.source, structure.field).constraint()
