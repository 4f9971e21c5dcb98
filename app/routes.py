"""Every route in one table: what it takes, what it answers, how it can fail, one example.

`/openapi.json` and `/docs` are made of it; a test holds it against the app's own routes. It knows
neither Flask nor the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from . import generate_requests, openai_requests, responses

JSON = "application/json"
_OPEN = frozenset({"/", "/docs", "/metrics", "/openapi.json"})
_SERVED = (500, 503)  # all routes that need the model
_WORKS = (400, 408, 413, 415, 504, *_SERVED)


def is_open(path: str) -> bool:
    """Does a request for it need no API key, though there are some? (`/admin/` has its own.)"""
    return path in _OPEN or path.startswith(("/health/", "/page/", "/admin/"))


@dataclass(frozen=True)
class Route:
    """`reply` is the model of a JSON answer; without one the answer is `media_type` as it is.
    `event` is what each server-sent event holds when the body asks for a stream."""

    method: str
    path: str  # as OpenAPI writes it: parameters in braces
    group: str
    summary: str
    reply: type[BaseModel] | None = None
    request: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    ends_with_done: bool = False  # the stream's last event is `[DONE]`
    errors: tuple[int, ...] = (400, 500)
    media_type: str = JSON
    example: dict[str, Any] | None = None

    @property
    def statuses(self) -> list[int]:
        """Of all its errors, those of the API key included."""
        if is_open(self.path):
            return sorted(self.errors)
        return sorted({*self.errors, 401, *([429] if self.method == "POST" else [])})

    @property
    def name(self) -> str:
        """As `post_v1_chat_completions`."""
        words = self.path.replace("{", "").replace("}", "").replace(".", "_").split("/")
        return "_".join([self.method.lower(), *filter(None, words)])


ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/chat/completions",
        "OpenAI",
        "Answers a conversation, as OpenAI's route does.",
        request=openai_requests.ChatRequest,
        reply=responses.ChatBody,
        event=responses.ChatChunk,
        ends_with_done=True,
        errors=(*_WORKS, 404),
        example={
            "messages": [
                {"role": "system", "content": "Answer in one sentence."},
                {"role": "user", "content": "What is the capital of France?"},
            ],
            "max_tokens": 16,
        },
    ),
    Route(
        "POST",
        "/v1/completions",
        "OpenAI",
        "Continues one text or several, as OpenAI's older route does.",
        request=openai_requests.CompletionRequest,
        reply=responses.CompletionBody,
        event=responses.CompletionChunk,
        ends_with_done=True,
        errors=(*_WORKS, 404),
        example={"prompt": "Gravity is", "max_tokens": 16, "temperature": 0},
    ),
    Route(
        "GET",
        "/v1/models",
        "OpenAI",
        "Lists the names that requests may give as model.",
        reply=responses.ModelsReply,
        errors=(400, *_SERVED),
    ),
    Route(
        "GET",
        "/v1/models/{name}",
        "OpenAI",
        "Describes the model under one of its names.",
        reply=responses.ModelReply,
        errors=(400, 404, *_SERVED),
    ),
    Route(
        "POST",
        "/v1/chat/render",
        "Our own",
        "Puts a conversation into the model's chat template; nothing is generated.",
        request=openai_requests.RenderRequest,
        reply=responses.RenderReply,
        errors=_WORKS,
        example={"messages": [{"role": "user", "content": "Hello"}]},
    ),
    Route(
        "POST",
        "/generate",
        "Our own",
        "Continues a text.",
        request=generate_requests.GenerateRequest,
        reply=responses.GenerateReply,
        event=responses.GenerateEvent,
        errors=_WORKS,
        example={"prompt": "Gravity is", "max_tokens": 16},
    ),
    Route(
        "POST",
        "/tokenize",
        "Our own",
        "Token ids of a text.",
        request=generate_requests.TokenizeRequest,
        reply=responses.TokenizeReply,
        errors=_WORKS,
        example={"prompt": "Gravity is"},
    ),
    Route(
        "POST",
        "/detokenize",
        "Our own",
        "The text of token ids, control tokens written out.",
        request=generate_requests.DetokenizeRequest,
        reply=responses.DetokenizeReply,
        errors=_WORKS,
        example={"tokens": [55, 88, 89]},
    ),
    Route(
        "GET",
        "/health/live",
        "Server",
        "200 as long as the process answers, while the model loads too.",
        reply=responses.LiveReply,
    ),
    Route(
        "GET",
        "/health/ready",
        "Server",
        "200 if requests should come here, else 503 with the reason.",
        reply=responses.ReadyReply,
        errors=(400, *_SERVED),
    ),
    Route(
        "GET",
        "/info",
        "Server",
        "What is served, how, and with which limits.",
        reply=responses.InfoReply,
        errors=(400, *_SERVED),
    ),
    Route(
        "GET",
        "/admin/model",
        "Admin",
        "Which model is served, which one loads, which ones still have requests.",
        reply=responses.AdminModelReply,
        errors=(400, 401, 403, 500),
    ),
    Route(
        "POST",
        "/admin/model",
        "Admin",
        "Switches to another model folder, and answers when that serves or cannot.",
        request=generate_requests.SwitchRequest,
        reply=responses.SwitchReply,
        errors=(400, 401, 403, 408, 409, 413, 415, *_SERVED),
        example={"path": "models/other"},
    ),
    Route("GET", "/metrics", "Server", "Prometheus metrics.", media_type="text/plain"),
    Route("GET", "/openapi.json", "Server", "This API as an OpenAPI 3.1 document."),
    Route("GET", "/docs", "Server", "This API as a page to read.", media_type="text/html"),
)
