"""The bodies of OpenAI's routes: `/v1/completions` and `/v1/chat/completions`.

Fields that only concern OpenAI's own platform are taken and ignored (`PLATFORM_FIELDS`); others
that are not here are refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from .fields import MAX_CHOICES, MAX_LOGPROBS, SamplingFields, Strict, TokenIds
from .tools import NO_ARGUMENTS, Tool, ToolUse

MAX_TOOLS = 128

# Who asks, where it is billed, kept or cached: without effect on the answer.
PLATFORM_FIELDS = (
    *("user", "safety_identifier", "prompt_cache_key", "metadata", "service_tier", "store"),
)
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_Prompt = Annotated[str, Field(min_length=1)]
_Prompts = Annotated[list[_Prompt], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
_Ids = Annotated[TokenIds, Field(min_length=1)]
_IdPrompts = Annotated[list[_Ids], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]


def _few_prompts(value: Any) -> Any:
    """Told of the list itself, whatever the members of the union say of its items."""
    if isinstance(value, list) and len(value) > MAX_CHOICES and not isinstance(value[0], int):
        raise ValueError(f"{len(value)} prompts are more than {MAX_CHOICES} choices")
    return value


_FewPrompts = BeforeValidator(_few_prompts)


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="true or false")
    include_obfuscation: bool | None = Field(
        None, description="true or false; without effect, nothing is obfuscated"
    )


class OpenAIFields(SamplingFields):
    model: str | None = Field(
        None, description="a name of the model that is served (GET /v1/models)"
    )
    stream_options: StreamOptions | None = Field(
        None, description="an object with include_usage, together with stream"
    )
    user: str | None = Field(None, description="a string; ignored")
    safety_identifier: str | None = Field(None, description="a string; ignored")
    prompt_cache_key: str | None = Field(None, description="a string; ignored")
    metadata: dict[str, Any] | None = Field(None, description="an object; ignored")
    service_tier: str | None = Field(None, description="a string; ignored")
    store: Literal[False] | None = Field(None, description="false; nothing is stored")

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> OpenAIFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only together with stream: true")
        return self


class CompletionRequest(OpenAIFields):
    """The body of `POST /v1/completions`."""

    prompt: Annotated[_Prompt | _Prompts | _Ids | _IdPrompts, _FewPrompts] = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists; "
        f"at most {MAX_CHOICES} prompts"
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description=f"an integer from 0 to {MAX_LOGPROBS}, of how many of the likeliest tokens "
        "beside each token of the answer",
    )
    best_of: int | None = Field(None, description="an integer equal to n: all answers are returned")
    echo: Literal[False] | None = Field(None, description="false; the prompt is not echoed")
    suffix: None = Field(None, description="null; text cannot be inserted")

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise ValueError(
                "best_of: must be equal to n; all answers are returned, none is chosen"
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Texts, or token ids of each; never mixed."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[id_ for id_ in self.prompt if isinstance(id_, int)]]
        texts = [each for each in self.prompt if isinstance(each, str)]
        return texts or [each for each in self.prompt if isinstance(each, list)]


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)]


# What the client library's stream and parse helpers add to a message, a second time and read: the
# message is taken as it is appended, and this left out.
_Added = Annotated[Any, Field(exclude=True)]


class CalledFunction(Strict):
    name: _Name
    arguments: str
    parsed_arguments: _Added = None


class CalledTool(Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction
    index: _Added = None


class _Message(Strict):
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: content as one string, no fields that are null; arguments
        of calls are text still."""
        fields = self.model_dump(exclude_none=True)
        role, content = fields.pop("role"), fields.pop("content", "")
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        return {"role": role, "content": text, **fields}


class SystemMessage(_Message):
    role: Literal["system", "developer"]
    content: Content


class UserMessage(_Message):
    role: Literal["user"]
    content: Content


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True)] | None = Field(
        None, min_length=1
    )
    parsed: _Added = None
    # As the client library returns them, where they are empty.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0, exclude=True)

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and self.tool_calls is None:
            raise ValueError("an assistant's message has content or tool_calls")
        return self


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(Strict):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _are_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise ValueError('must be a JSON schema of type "object"')
        return schema

    def tool(self) -> Tool:
        parameters = self.parameters or NO_ARGUMENTS
        return Tool(self.name, parameters, self.description, bool(self.strict))


class FunctionTool(Strict):
    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    name: _Name


class ChosenTool(Strict):
    type: Literal["function"]
    function: ChosenFunction


class RenderRequest(Strict):
    """The body of `POST /v1/chat/render`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(
        min_length=1,
        description="a list of at least one message, each with a role (system, developer, user, "
        "assistant or tool) and content: a string, or a list of parts of type text",
    )
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = Field(
        None,
        min_length=1,
        max_length=MAX_TOOLS,
        description=f"a list of 1 to {MAX_TOOLS} functions: type, and function with name, "
        "description, parameters (a JSON schema) and strict",
    )

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]

    def tool_use(self) -> ToolUse | None:
        """None if no tool may be called."""
        tools = tuple(tool.function.tool() for tool in self.tools or ())
        return ToolUse(tools, tools, is_forced=False, is_parallel=True) if tools else None

    @model_validator(mode="after")
    def _names_no_two_tools_alike(self) -> RenderRequest:
        names = [tool.function.name for tool in self.tools or ()]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(f"tools[{i}].function.name: {name} is another tool's name, too")
        return self


class ChatRequest(RenderRequest, OpenAIFields):
    """The body of `POST /v1/chat/completions`."""

    max_completion_tokens: int | None = Field(
        None, ge=1, description="an integer of at least 1; OpenAI's newer name of max_tokens"
    )
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description=f"an integer from 0 to {MAX_LOGPROBS}, together with logprobs: true",
    )
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = Field(
        None,
        description='"none", "auto", "required", or an object that names one of the tools',
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = Field(
        None, description='["text"]'
    )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def tool_use(self) -> ToolUse | None:
        use, choice = super().tool_use(), self.tool_choice
        if use is None or choice == "none":
            return None
        if isinstance(choice, ChosenTool):
            chosen = tuple(tool for tool in use.tools if tool.name == choice.function.name)
            return replace(use, callable=chosen, is_forced=True, is_parallel=False)
        is_parallel = self.parallel_tool_calls is not False
        return replace(use, is_forced=choice == "required", is_parallel=is_parallel)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only together with logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_completion_tokens: cannot be given together with max_tokens")
        if self.tool_choice not in (None, "none") and self.tools is None:
            raise ValueError("tool_choice: only together with tools")
        if self.parallel_tool_calls is not None and self.tools is None:
            raise ValueError("parallel_tool_calls: only together with tools")
        if isinstance(self.tool_choice, ChosenTool):
            named = self.tool_choice.function.name
            if named not in {tool.function.name for tool in self.tools or ()}:
                raise ValueError(f"tool_choice: {named} is none of the tools")
        return self
