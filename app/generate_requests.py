"""The bodies of our own routes: `/generate`, `/tokenize`, `/detokenize`."""

from __future__ import annotations

from pydantic import Field, model_validator

from .fields import MAX_LOGPROBS, SamplingFields, Strict, Structure, TokenIds

DEFAULT_MAX_TOKENS = 256
MAX_TOKENS = 131_072  # of one text: the longest context of the models that are served


class GenerateRequest(SamplingFields):
    """The body of `POST /generate`."""

    prompt: str = Field(min_length=1, description="text of at least one character")
    parse_special: bool | None = Field(
        None,
        description="true or false; true reads control tokens written in the prompt as such and "
        "adds none, for prompts that already carry the model's chat template",
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        allow_inf_nan=False,
        description="a number from 0 (greedy) to 2; by default 0, or 1 if seed is given or one of "
        "top_p, top_k and min_p is on",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description=f"an integer from 0 to {MAX_LOGPROBS}, of how many of the likeliest tokens "
        "beside each token of the answer",
    )
    regex: str | None = Field(
        None, min_length=1, description="a regular expression that the whole answer matches"
    )
    grammar: str | None = Field(
        None, min_length=1, description="a grammar in llguidance's Lark that the answer follows"
    )

    @model_validator(mode="after")
    def _one_structure(self) -> GenerateRequest:
        given = [
            name
            for name in ("response_format", "regex", "grammar")
            if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: cannot be given together with {given[0]}")
        return self

    def structure(self) -> Structure | None:
        if self.regex is not None:
            return Structure("regex", "regex", self.regex)
        if self.grammar is not None:
            return Structure("grammar", "lark", self.grammar)
        return super().structure()

    def default_temperature(self) -> float:
        restricts = (self.top_p or 1) < 1 or (self.top_k or 0) > 0 or (self.min_p or 0) > 0
        return 1.0 if restricts or self.seed is not None else 0.0


class TokenizeRequest(Strict):
    """The body of `POST /tokenize`."""

    prompt: str = Field(description="text")
    parse_special: bool | None = Field(
        None, description="true or false; true reads control tokens in the text as such"
    )
    add_special_tokens: bool | None = Field(
        None,
        description="true or false; true puts in front what the tokenizer puts before a prompt",
    )


class DetokenizeRequest(Strict):
    """The body of `POST /detokenize`."""

    tokens: TokenIds = Field(
        max_length=MAX_TOKENS,
        description=f"a list of at most {MAX_TOKENS} token ids of the model's vocabulary",
    )


class SwitchRequest(Strict):
    """The body of `POST /admin/model`."""

    path: str = Field(
        min_length=1,
        max_length=4096,
        pattern=r"^[^\x00]*$",
        description="path of a model folder on the server's machine, 1 to 4096 characters",
    )
    force: bool | None = Field(
        None, description="true or false; true loads also what is served already, unchanged"
    )
