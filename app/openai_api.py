"""OpenAI's routes, as its clients call them."""

from __future__ import annotations

from flask import Blueprint, Response, g

from .errors import InvalidRequest, ModelNotFound
from .fields import MAX_CHOICES
from .http import json_response, read_deadline, read_request, send_stream, send_whole
from .limits import check_ids
from .openai_replies import CompletionReply, Reply
from .openai_requests import CompletionRequest, OpenAIFields
from .service import Ask, Service

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat's answer may fill the context


def openai_routes(service: Service) -> Blueprint:
    routes = Blueprint("openai", __name__, url_prefix="/v1")

    @routes.post("/completions")
    def completions() -> Response:
        asked = read_request(CompletionRequest, service.settings)
        _check_model(service, asked.model)
        answer = service.submit(asked, _ask_completion(service, asked))
        return _send(asked, CompletionReply(answer, service.model.codec, _name(service, asked)))

    @routes.get("/models")
    def models() -> Response:
        data = [_describe(service, name) for name in service.model_names]
        return json_response({"object": "list", "data": data})

    @routes.get("/models/<path:name>")
    def model(name: str) -> Response:
        _check_model(service, name)
        return json_response(_describe(service, name))

    return routes


def _send(asked: OpenAIFields, reply: Reply) -> Response:
    if asked.stream:
        return send_stream(
            reply.answer, lambda deltas: reply.chunks(deltas, includes_usage=asked.includes_usage)
        )
    return send_whole(reply.answer, reply.whole)


def _ask_completion(service: Service, asked: CompletionRequest) -> Ask:
    prompts = [
        service.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts
    ]
    for prompt in prompts:
        check_ids(prompt, service.model.vocab_size, "prompt")
    if len(prompts) * asked.num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"prompt: {len(prompts)} prompts with n={asked.num_choices} answers each are more "
            f"than {MAX_CHOICES} choices",
            param="prompt",
        )
    return Ask(
        g.request_id,
        g.arrived_at,
        prompts,
        num_logprobs=asked.logprobs,
        max_tokens=asked.max_tokens,
        default_max_tokens=_COMPLETION_MAX_TOKENS,
        deadline_at=read_deadline(asked.timeout_ms, service.settings),
    )


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name not in service.model_names:
        known = ", ".join(service.model_names)
        raise ModelNotFound(
            f"model: {name:.200} is not served here; what is: {known} (SERVED_MODEL_NAME adds "
            "names)",
            param="model",
        )


def _name(service: Service, asked: OpenAIFields) -> str:
    return asked.model or service.model_names[0]


def _describe(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.model.created_at,
        "owned_by": "phi-serve",
        "max_model_len": service.model.max_model_len,
    }
