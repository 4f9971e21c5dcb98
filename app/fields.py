"""What a request may say about its answer: the fields that all generating routes share.

The pydantic models here and in the `*_requests` modules are the one statement of what a field may
be: their descriptions state the limits, an error quotes them, and `/openapi.json` shows them.
Unknown fields are refused, types are not converted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from .sequence import SamplingParams

_ANY_OBJECT: dict[str, Any] = {"type": "object"}

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_PRIORITY = 1000
MAX_TOKEN_IDS = 16_384  # of a list of ids that can or cannot come
_MAX_BIASES = 1024

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Without leading zeros: "1" and "01" would be one id with two values.
_Digits = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})$")]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
# Lists end at their first error: pydantic would collect one of each item, on the hub.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=16)]


def _few(value: Any) -> Any:
    """Before the items of an object are looked at, each of which may have its error."""
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise ValueError(f"it has {len(value)} entries")
    return value


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class JsonSchema(Strict):
    name: str = Field(
        pattern=r"^[A-Za-z0-9_-]{1,64}$", description="1 to 64 letters, digits, _ and -"
    )
    description: str | None = Field(None, description="a string; for people")
    schema_: dict[str, Any] | bool | None = Field(
        None, alias="schema", description="a JSON schema; by default any object"
    )
    strict: bool | None = Field(
        None, description="true or false; the schema is always kept to, whatever it says"
    )


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


@dataclass(frozen=True, slots=True)
class Structure:
    """The form that an answer must have; `field` asks for it, and messages name it."""

    field: str
    kind: Literal["json_schema", "regex", "lark", "tools"]
    source: Any  # a JSON schema, a regular expression, a grammar, or a `ToolForm`
    is_free: bool = False  # any text is an answer, too: the form is that of parts of it


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class SamplingFields(Strict):
    """Names and meanings are OpenAI's, or else vLLM's."""

    stream: bool | None = Field(None, description="true or false; true: server-sent events")
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="an integer from 1 to what the prompt leaves of the model's context",
    )
    min_tokens: int | None = Field(
        None,
        ge=0,
        description="an integer from 0 to max_tokens; until then no end token, stop string or "
        "repetition_guard ends the answer",
    )
    temperature: float | None = Field(
        None, ge=0, le=2, allow_inf_nan=False, description="a number from 0 (greedy) to 2"
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="a number above 0 and at most 1 (off)"
    )
    top_k: int | None = Field(None, ge=-1, description="an integer; 0 or -1 is off")
    min_p: float | None = Field(None, ge=0, le=1, description="a number from 0 (off) to 1")
    repetition_penalty: float | None = Field(
        None,
        ge=0.01,
        le=100,
        description="a number from 0.01 to 100; 1 is off, more makes tokens of the prompt and the "
        "answer less likely",
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="a number from -2 to 2; 0 is off"
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="a number from -2 to 2; 0 is off"
    )
    logit_bias: Annotated[dict[_Digits, _Bias] | None, BeforeValidator(_few)] = Field(
        None,
        max_length=_MAX_BIASES,
        description=f"an object of at most {_MAX_BIASES} token ids (as strings, without leading "
        "zeros), each with a number from -100 to 100",
    )
    allowed_token_ids: TokenIds | None = Field(
        None,
        min_length=1,
        max_length=MAX_TOKEN_IDS,
        description=f"a list of 1 to {MAX_TOKEN_IDS} token ids; no other can come",
    )
    banned_token_ids: TokenIds | None = Field(
        None,
        max_length=MAX_TOKEN_IDS,
        description=f"a list of at most {MAX_TOKEN_IDS} token ids that cannot come",
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="an integer of 64 bits; random by default"
    )
    n: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description=f"an integer from 1 to {MAX_CHOICES}, how many answers",
    )
    stop: StopString | StopStrings | None = Field(
        None,
        description="a string, or a list of at most 16, of 1 to 1024 characters each; the answer "
        "ends in front of the first",
    )
    stop_token_ids: TokenIds | None = Field(
        None, max_length=1024, description="a list of at most 1024 token ids that end the answer"
    )
    ignore_eos: bool | None = Field(
        None, description="true or false; true: the model's own end does not end the answer"
    )
    repetition_guard: int | None = Field(
        None,
        ge=2,
        le=1000,
        description="an integer from 2 to 1000, how often the same 1 to 32 tokens may stand in a "
        "row until the answer ends, or null (off)",
    )
    timeout_ms: int | None = Field(
        None,
        ge=1,
        description="an integer of at least 1 and at most the server's MAX_TIMEOUT_MS: "
        "milliseconds from the request's arrival to the end of its answer",
    )
    priority: int | None = Field(
        None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description=f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}, 0 by default: of the "
        "requests that wait for the same API key, lower ones run first",
    )
    response_format: ResponseFormat | None = Field(
        None,
        description='an object with the type "text", "json_object", or "json_schema" with a '
        "json_schema of name and schema",
    )

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def structure(self) -> Structure | None:
        """What `response_format` asks for; None is any text."""
        wanted = self.response_format
        if isinstance(wanted, JsonObjectFormat):
            return Structure("response_format", "json_schema", _ANY_OBJECT)
        if isinstance(wanted, JsonSchemaFormat):
            schema = wanted.json_schema.schema_
            source = _ANY_OBJECT if schema is None else schema
            return Structure("response_format", "json_schema", source)
        return None

    def default_temperature(self) -> float:
        return 1.0

    def first_seed(self) -> int:
        """Of a prompt's first choice: another one each time where the request gives none."""
        return secrets.randbits(64) if self.seed is None else self.seed % 2**64

    def params(self, max_tokens: int, num_logprobs: int | None) -> SamplingParams:
        temperature = self.temperature
        bias = self.logit_bias or {}
        allowed = self.allowed_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=self.default_temperature() if temperature is None else temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias={int(id_): value for id_, value in bias.items()},
            allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
            banned_token_ids=tuple(sorted(set(self.banned_token_ids or ()))),
            seed=self.first_seed(),
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            repetition_guard=self.repetition_guard or 0,
            num_logprobs=num_logprobs,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
