"""JSON in, JSON and SSE out. Past this module there are only validated requests.

The pydantic models are the one statement of what a field may be; their descriptions state the
limits, and an error quotes them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import InvalidRequest, PromptTooLong, ServeError
from .sequence import SamplingParams

if TYPE_CHECKING:
    from .completion import Answer, Completion, Delta

    Indexed = tuple[int, Delta]

log = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 256


class GenerateRequest(BaseModel):
    """The body of `POST /generate`. Unknown fields are refused, types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1, description="text of at least one character")
    parse_special: bool = Field(
        False,
        description="true or false; true reads control tokens written in the prompt as such and "
        "adds none, for prompts that already carry the model's chat template",
    )
    stream: bool = Field(False, description="true or false")
    max_tokens: int = Field(
        DEFAULT_MAX_TOKENS,
        ge=1,
        description="an integer from 1 to what the prompt leaves of the model's context",
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        allow_inf_nan=False,
        description="a number from 0 (greedy) to 2; by default 0, or 1 if top_p, top_k or seed "
        "is given",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and at most 1 (off)")
    top_k: int = Field(0, ge=-1, description="an integer; 0 or -1 is off")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="an integer of 64 bits; random by default"
    )
    ignore_eos: bool = Field(False, description="true or false; true generates max_tokens tokens")
    repetition_guard: int | None = Field(
        None,
        ge=2,
        le=1000,
        description="an integer from 2 to 1000, how often the same 1 to 32 tokens may stand in a "
        "row until the answer ends, or null (off)",
    )

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        temperature = self.temperature
        if temperature is None:
            is_sampled = self.seed is not None or self.model_fields_set & {"top_p", "top_k"}
            temperature = 1.0 if is_sampled else 0.0
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            seed=secrets.randbits(64) if self.seed is None else self.seed % 2**64,
            ignore_eos=self.ignore_eos,
            repetition_guard=self.repetition_guard or 0,
        )


M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], body: bytes) -> M:
    """Raises InvalidRequest naming the field, what is wrong with it and what it may be."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return model.model_validate(parsed)
    except ValidationError as error:
        raise _invalid(model, error) from None


def _invalid(model: type[BaseModel], error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    param = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields)
        return InvalidRequest(f"{param}: not a field of this route; it knows {known}", param=param)
    if first["type"] == "missing":
        return InvalidRequest(f"{param}: is required", param=param)
    limits = model.model_fields[param].description
    return InvalidRequest(f"{param}: {first['msg']}; it must be {limits}", param=param)


def resolve_max_tokens(request: GenerateRequest, num_prompt: int, max_model_len: int) -> int:
    """How many tokens the answer may have; the default gives way to the context's end.

    Raises PromptTooLong or InvalidRequest, with the numbers, if prompt and answer do not fit.
    """
    room = max_model_len - num_prompt
    if room < 1:
        raise PromptTooLong(num_prompt, max_model_len)
    if "max_tokens" not in request.model_fields_set:
        return min(request.max_tokens, room)
    if request.max_tokens > room:
        raise InvalidRequest(
            f"max_tokens: {request.max_tokens} is too much; the context of {max_model_len} tokens "
            f"less the prompt of {num_prompt} leaves {room}",
            param="max_tokens",
        )
    return request.max_tokens


def usage(completions: list[Completion]) -> dict[str, int]:
    """Tokens of a request: each prompt once, and of all choices."""
    prompts = {id(c.sequence.prompt_ids): len(c.sequence.prompt_ids) for c in completions}
    num_prompt = sum(prompts.values())
    num_output = sum(completion.num_tokens for completion in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def timings(completion: Completion) -> dict[str, float | None]:
    """Seconds in the queue, until the first token from there, and from it to the last; and the
    rate of the tokens after the first."""
    sequence = completion.sequence
    admitted, first = sequence.admitted_at, sequence.first_token_at
    last = sequence.last_token_at
    if admitted is None or first is None or last is None:
        return {}
    decode = last - first
    rate = (completion.num_tokens - 1) / decode if decode > 0 else None
    return {
        "queue_seconds": round(admitted - sequence.arrived_at, 6),
        "prefill_seconds": round(first - admitted, 6),
        "decode_seconds": round(decode, 6),
        "tokens_per_second": None if rate is None else round(rate, 2),
    }


def result(answer: Answer, deltas: Iterable[Indexed], model: str) -> dict[str, Any]:
    """The whole answer as one object."""
    try:
        taken = [delta for _, delta in deltas]
    finally:
        answer.abort()  # nothing to do but after a failure
    text = "".join(delta.text for delta in taken)
    return {"text": text} | _end(answer, taken[-1], model)


def events(answer: Answer, deltas: Iterable[Indexed], model: str) -> Iterator[bytes]:
    """The answer as SSE: an event per delta, the last with what the plain answer has besides.

    The status has been sent by then, so a failure becomes one error event, and the stream ends.
    """
    try:
        for _, delta in deltas:
            end = _end(answer, delta, model) if delta.finish_reason is not None else {}
            yield event({"text": delta.text} | end)
    except ServeError as error:
        yield event(error.body())
    except Exception:
        log.exception("request %s failed in mid-stream", answer.completions[0].sequence.request_id)
        yield event(ServeError("the server failed on this request").body())
    finally:  # also when a write failed because the client has left
        answer.abort()


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def _end(answer: Answer, last: Delta, model: str) -> dict[str, Any]:
    return {
        "finish_reason": last.finish_reason,
        "usage": usage(answer.completions),
        "timings": timings(answer.completions[0]),
        "request_id": answer.completions[0].sequence.request_id,
        "model": model,
    }
