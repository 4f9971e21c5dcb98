"""Our own routes: `/generate`, `/tokenize`, `/detokenize`."""

from __future__ import annotations

from flask import Blueprint, Response

from . import generate_replies
from .generate_requests import (
    DEFAULT_MAX_TOKENS,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from .http import ask, json_response, owner, read_deadline, read_request, send_stream, send_whole
from .limits import check_ids
from .service import Ask, Service


def generate_routes(service: Service) -> Blueprint:
    routes = Blueprint("generate", __name__)

    @routes.post("/generate")
    def generate() -> Response:
        codec, name = service.model.codec, service.model_names[0]
        asked = read_request(GenerateRequest, service.settings)
        answer = service.submit(asked, _ask(service, asked))
        if asked.stream:
            return send_stream(
                answer,
                lambda deltas: generate_replies.events(answer, deltas, codec, name),
                generate_replies.running(answer, codec),
                service.metrics.rejected,
            )
        return send_whole(
            answer, lambda deltas: generate_replies.result(answer, deltas, codec, name)
        )

    @routes.post("/tokenize")
    def tokenize() -> Response:
        asked = read_request(TokenizeRequest, service.settings)
        [ids] = service.encode(
            [asked.prompt],
            parse_special=bool(asked.parse_special),
            prefix=bool(asked.add_special_tokens),
            deadline_at=read_deadline(None, service.settings),
        )
        limit = service.model.max_model_len
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": limit})

    @routes.post("/detokenize")
    def detokenize() -> Response:
        asked = read_request(DetokenizeRequest, service.settings)
        check_ids(asked.tokens, service.model.vocab_size, "tokens")
        deadline_at = read_deadline(None, service.settings)
        return json_response({"prompt": service.decode(asked.tokens, deadline_at)})

    return routes


def _ask(service: Service, asked: GenerateRequest) -> Ask:
    deadline_at = read_deadline(asked.timeout_ms, service.settings)
    service.check_room(owner(), asked.num_choices)
    prompts = service.encode(
        [asked.prompt], parse_special=bool(asked.parse_special), deadline_at=deadline_at
    )
    return ask(
        prompts,
        deadline_at,
        num_logprobs=asked.logprobs,
        max_tokens=asked.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        structure=asked.structure(),
    )
