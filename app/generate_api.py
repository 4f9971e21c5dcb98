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
from .limits import check_ids
from .served import Ask, Served
from .service import Service


def generate_routes(service: Service) -> Blueprint:
    routes = Blueprint("generate", __name__)

    @routes.post("/generate")
    def generate() -> Response:
        asked = read_request(GenerateRequest, service.settings)
        served = take(service)
        codec, name = served.model.codec, served.model_names[0]
        answer = served.submit(asked, _ask(served, asked))
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
        served = take(service)
        [ids] = served.encode(
            [asked.prompt],
            parse_special=bool(asked.parse_special),
            prefix=bool(asked.add_special_tokens),
            waiter=waiter(read_deadline(None, service.settings)),
        )
        limit = served.model.max_model_len
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": limit})

    @routes.post("/detokenize")
    def detokenize() -> Response:
        asked = read_request(DetokenizeRequest, service.settings)
        served = take(service)
        check_ids(asked.tokens, served.model.vocab_size, "tokens")
        deadline_at = read_deadline(None, service.settings)
        return json_response({"prompt": served.decode(asked.tokens, waiter(deadline_at))})

    return routes


def _ask(served: Served, asked: GenerateRequest) -> Ask:
    deadline_at = read_deadline(asked.timeout_ms, served.settings)
    served.check_room(owner(), asked.num_choices)
    prompts = served.encode(
        [asked.prompt], parse_special=bool(asked.parse_special), waiter=waiter(deadline_at)
    )
    return ask(
        prompts,
        deadline_at,
        num_logprobs=asked.logprobs,
        max_tokens=asked.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        structure=asked.structure(),
    )
