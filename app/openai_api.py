"""OpenAI's routes, as its clients call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response

from .errors import InvalidRequest, ModelNotFound
from .fields import MAX_CHOICES, Structure
from .http import (
    ask,
    json_response,
    owner,
    read_deadline,
    read_request,
    send_stream,
    send_whole,
    take,
    waiter,
)
from .limits import check_ids, check_messages
from .openai_replies import ChatReply, CompletionReply, Reply
from .openai_requests import (
    ChatRequest,
    CompletionRequest,
    OpenAIFields,
    RenderRequest,
)
from .schema import check_size
from .served import Ask, Served
from .service import Service
from .tool_calls import ToolParser
from .tool_grammar import ToolForm
from .tools import ToolUse

if TYPE_CHECKING:
    from .chat import Rendered  # brings transformers, which the hub does not wait for

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat's answer may fill the context


def openai_routes(service: Service) -> Blueprint:
    routes = Blueprint("openai", __name__, url_prefix="/v1")

    @routes.post("/completions")
    def completions() -> Response:
        asked = read_request(CompletionRequest, service.settings)
        served = take(service)
        _check_model(served, asked.model)
        answer = served.submit(asked, _ask_completion(served, asked))
        codec, name = served.model.codec, _name(served, asked)
        return _send(service, asked, CompletionReply(answer, codec, name))

    @routes.post("/chat/completions")
    def chat_completions() -> Response:
        asked = read_request(ChatRequest, service.settings)
        served = take(service)
        _check_model(served, asked.model)
        use = asked.tool_use()
        answer = served.submit(asked, _ask_chat(served, asked, use))
        parsers = [_tool_parser(served, use) for _ in answer.completions] if use else None
        codec, name = served.model.codec, _name(served, asked)
        return _send(service, asked, ChatReply(answer, codec, name, parsers))

    @routes.post("/chat/render")
    def chat_render() -> Response:
        asked = read_request(RenderRequest, service.settings)
        served = take(service)
        deadline_at = read_deadline(None, service.settings)
        use = asked.tool_use()
        rendered = _render(served, asked, use, deadline_at)
        if (structure := _tools_structure(served, use)) and served.model.grammars is not None:
            # What a request for an answer would be refused for.
            served.compile(structure, waiter(deadline_at))
        return json_response(
            {
                "prompt": rendered.text,
                "tokens": rendered.token_ids,
                "count": len(rendered.token_ids),
                "max_model_len": served.model.max_model_len,
            }
        )

    @routes.get("/models")
    def models() -> Response:
        served = service.current
        data = [_describe(served, name) for name in served.model_names]
        return json_response({"object": "list", "data": data})

    @routes.get("/models/<path:name>")
    def model(name: str) -> Response:
        _check_model(service.current, name)
        return json_response(_describe(service.current, name))

    return routes


def _send(service: Service, asked: OpenAIFields, reply: Reply) -> Response:
    if asked.stream:
        return send_stream(
            reply.answer,
            lambda deltas: reply.chunks(deltas, includes_usage=asked.includes_usage),
            reply.running(includes_usage=asked.includes_usage),
            service.metrics.rejected,
        )
    return send_whole(reply.answer, reply.whole)


def _ask_completion(served: Served, asked: CompletionRequest) -> Ask:
    if len(asked.prompts) * asked.num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"prompt: {len(asked.prompts)} prompts with n={asked.num_choices} answers each are "
            f"more than {MAX_CHOICES} choices",
            param="prompt",
        )
    deadline_at = read_deadline(asked.timeout_ms, served.settings)
    served.check_room(owner(), len(asked.prompts) * asked.num_choices)
    prompts = _prompt_ids(served, asked.prompts, deadline_at)
    for prompt in prompts:
        check_ids(prompt, served.model.vocab_size, "prompt")
    return ask(
        prompts,
        deadline_at,
        num_logprobs=asked.logprobs,
        max_tokens=asked.max_tokens,
        default_max_tokens=_COMPLETION_MAX_TOKENS,
        structure=asked.structure(),
    )


def _prompt_ids(
    served: Served, prompts: list[str] | list[list[int]], deadline_at: float | None
) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    return served.encode(texts, waiter=waiter(deadline_at)) if texts else ids


def _ask_chat(served: Served, asked: ChatRequest, use: ToolUse | None) -> Ask:
    deadline_at = read_deadline(asked.timeout_ms, served.settings)
    served.check_room(owner(), asked.num_choices)
    rendered = _render(served, asked, use, deadline_at)
    structure = asked.structure()
    if use is not None and structure is not None:
        raise InvalidRequest(
            "response_format: cannot be given together with tools that may be called; "
            'tool_choice "none" leaves them out',
            param="response_format",
        )
    marker_ids = served.model.chat.marker_ids if use else {}
    return ask(
        [rendered.token_ids],
        deadline_at,
        num_logprobs=asked.num_logprobs,
        prompt_field="messages",
        max_tokens=asked.max_tokens or asked.max_completion_tokens,
        max_tokens_field="max_completion_tokens" if asked.max_completion_tokens else "max_tokens",
        structure=structure or _tools_structure(served, use),
        visible_ids=frozenset(marker_ids.values()),
    )


def _render(
    served: Served, asked: RenderRequest, use: ToolUse | None, deadline_at: float | None
) -> Rendered:
    """Raises InvalidRequest; about tools before the template, which writes them, runs."""
    check_messages(len(asked.messages), served.model.max_model_len)
    for i, tool in enumerate(use.tools if use else ()):
        try:
            check_size(tool.parameters)
        except ValueError as error:
            field = f"tools[{i}].function.parameters"
            raise InvalidRequest(f"{field}: {error}", param=field) from None
    return served.render(asked.template_messages, use, waiter(deadline_at))


def _tools_structure(served: Served, use: ToolUse | None) -> Structure | None:
    """The form of an answer with calls; `_render` has taken the tools."""
    if use is None:
        return None
    chat = served.model.chat
    assert chat.tool_format is not None  # rendering has refused otherwise
    form = ToolForm(use, chat.tool_format, chat.marker_ids)
    # Where answers cannot be held to a form, calls that need not come are still found in them.
    if not form.is_held or (served.model.grammars is None and not form.is_needed):
        return None
    return Structure("tools", "tools", form, is_free=not use.is_forced)


def _tool_parser(served: Served, use: ToolUse) -> ToolParser:
    format_ = served.model.chat.tool_format
    assert format_ is not None
    names = {tool.name for tool in use.callable}
    return ToolParser(format_, names, None if use.is_parallel else 1, is_forced=use.is_forced)


def _check_model(served: Served, name: str | None) -> None:
    if name is not None and name not in served.model_names:
        known = ", ".join(served.model_names)
        raise ModelNotFound(
            f"model: {name:.200} is not served here; what is: {known} (SERVED_MODEL_NAME adds "
            "names)",
            param="model",
        )


def _name(served: Served, asked: OpenAIFields) -> str:
    return asked.model or served.model_names[0]


def _describe(served: Served, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": served.model.created_at,
        "owned_by": "phi-serve",
        "max_model_len": served.model.max_model_len,
    }
