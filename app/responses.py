"""What each route answers, as pydantic models: for `/openapi.json` and for tests that hold answers
against it. The answers themselves are written by the `*_replies` modules, as plain objects.

A field that is `Absent` may be missing, and is not null then; nothing that is not here may come.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

T = TypeVar("T")
Absent: TypeAlias = T | SkipJsonSchema[None]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Reason = Literal["stop", "length", "repetition", "timeout"]
ChatReason = Literal["stop", "length", "repetition", "timeout", "tool_calls"]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Error(Body):
    message: str = Field(description="for people; names the field and its limit")
    type: str
    code: str = Field(description="for programs")
    param: str | None = Field(description="the field, header or parameter that is wrong")
    queue_position: Absent[Count] = Field(
        None, description="of a 429: the place in the queue that there was no room for, from 1"
    )
    queue_length: Absent[Count] = Field(None, description="of a 429: how many choices wait")
    estimated_wait_seconds: Absent[Seconds] = Field(
        None, description="of a 429: until what is in front would have been taken up"
    )


class ErrorReply(Body):
    """OpenAI's error object."""

    error: Error


class PromptDetails(Body):
    cached_tokens: Count = Field(description="that were not read, for the cache had them already")


class Usage(Body):
    prompt_tokens: Count = Field(description="of each prompt once")
    prompt_tokens_details: PromptDetails
    completion_tokens: Count = Field(description="of all choices, end tokens included")
    total_tokens: Count


class Timings(Body):
    queue_seconds: Seconds = Field(description="from arrival until a row was free")
    prefill_seconds: Seconds = Field(description="from there to the first token")
    decode_seconds: Seconds = Field(description="from the first token to the last")
    tokens_per_second: Seconds | None = Field(
        description="tokens after the first over decode_seconds; null if there is only one"
    )


class LikelyToken(Body):
    id: Count
    token: str = Field(description="its text; U+FFFD for a part of a character")
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChosenToken(LikelyToken):
    top_logprobs: list[LikelyToken] = Field(description="the likeliest in its place")


class Ending(Body):
    """What stands beside every answer."""

    timings: Timings
    request_id: str = Field(description="as in X-Request-Id")


class GenerateChoice(Body):
    index: Count
    text: str
    logprobs: Absent[list[ChosenToken]] = None
    finish_reason: Reason


class GenerateReply(Ending):
    """With n above 1, `choices` has all answers and the top is the first of them."""

    text: str
    finish_reason: Reason
    logprobs: Absent[list[ChosenToken]] = None
    choices: Absent[list[GenerateChoice]] = None
    usage: Usage
    model: str


class GenerateEvent(Body):
    """`usage`, `timings`, `request_id` and `model` stand on the last event."""

    index: Absent[Count] = Field(None, description="of the choice, if there are several")
    text: str
    logprobs: Absent[list[ChosenToken]] = None
    finish_reason: Absent[Reason] = Field(None, description="on a choice's last event")
    usage: Absent[Usage] = None
    timings: Absent[Timings] = None
    request_id: Absent[str] = None
    model: Absent[str] = None


class TokenizeReply(Body):
    tokens: list[Count]
    count: Count
    max_model_len: Count = Field(description="most tokens of prompt and answer together")


class DetokenizeReply(Body):
    prompt: str


class RenderReply(TokenizeReply):
    prompt: str = Field(description="the conversation in the model's chat template")


class CompletionLogprobs(Body):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class CompletionChoice(Body):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason


class CompletionChunkChoice(CompletionChoice):
    finish_reason: Reason | None  # type: ignore[assignment]


class _Object(Body):
    id: str = Field(description="random; the request's own is request_id")
    created: Count = Field(description="seconds since 1970")
    model: str


class CompletionBody(_Object, Ending):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class _Chunk(_Object):
    usage: Usage | None = Field(
        None, description="with stream_options.include_usage: on a last chunk without choices"
    )
    timings: Absent[Timings] = Field(None, description="on the last chunk with a choice")
    request_id: Absent[str] = None


class CompletionChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class CalledFunctionReply(Body):
    name: str
    arguments: str = Field(description="JSON; its start, if the answer is cut within the call")


class ToolCallReply(Body):
    id: str
    type: Literal["function"]
    function: CalledFunctionReply


class ToolCallDelta(ToolCallReply):
    index: Count


class ChatMessageReply(Body):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: Absent[list[ToolCallReply]] = Field(None, min_length=1)


class ChatLogprobs(Body):
    content: list[ChosenToken]
    refusal: None


class ChatChoice(Body):
    index: Count
    message: ChatMessageReply
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason


class ChatBody(_Object, Ending):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Body):
    role: Absent[Literal["assistant"]] = Field(None, description="on a choice's first chunk")
    content: Absent[str] = None
    refusal: None = None
    tool_calls: Absent[list[ToolCallDelta]] = None


class ChatChunkChoice(Body):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason | None


class ChatChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ModelReply(Body):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count


class ModelsReply(Body):
    object: Literal["list"]
    data: list[ModelReply]


class LiveReply(Body):
    status: Literal["live"]


class ReadyReply(Body):
    status: Literal["ready"]
    model: str


class InfoReply(BaseModel):
    """Model, precision, form and file of the graph, provider in use, limits, versions."""

    model_config = ConfigDict(extra="allow")

    model: str
    version: str  # of this server
    max_body_bytes: Count
    max_timeout_ms: Count  # 0: no limit
    max_connections: Count
    max_queued_requests: Count
    max_queued_tokens: Count
    loading: LoadingFolder | None  # that the server is switching to


class LoadingFolder(Body):
    folder: str
    stage: str


class ServedModel(Body):
    model: str | None  # null until it is loaded
    path: str


class LoadingModel(Body):
    path: str
    stage: str


class AdminModelReply(ServedModel):
    """`retiring`: they were switched from, and still answer requests."""

    loading: LoadingModel | None
    retiring: list[ServedModel]


class SwitchReply(ServedModel):
    """`switched` is false if the model was served already, unchanged."""

    switched: bool
    seconds: float
