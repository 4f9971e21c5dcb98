"""The routes. Each reads a request, hands it on and frames the answer; one handler turns every
error into OpenAI's error object and counts it."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import flask
import orjson
from flask import Flask, Response, request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from werkzeug.exceptions import HTTPException

from . import protocol
from .errors import (
    InvalidRequest,
    PayloadTooLarge,
    ServeError,
    UnsupportedMediaType,
    error_body,
)
from .service import Service

log = logging.getLogger(__name__)

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the stream back
}


def create_app(service: Service) -> Flask:
    app = Flask(__name__, static_folder=None)

    @app.post("/generate")
    def generate() -> Response:
        model = service.model
        parsed = protocol.parse(protocol.GenerateRequest, _read_body(service))
        completion = service.submit(parsed)
        pieces = iter(completion)
        if not parsed.stream:
            return _json(protocol.result(completion, pieces, model.name))
        # The first piece comes before the status: a failure until then is still a real 5xx.
        pieces = itertools.chain([next(pieces)], pieces)
        return Response(protocol.events(completion, pieces, model.name), headers=_SSE_HEADERS)

    @app.get("/health/live")
    def live() -> Response:
        return _json({"status": "live"})

    @app.get("/health/ready")
    def ready() -> Response:
        return _json({"status": "ready", "model": service.model.name})

    @app.get("/info")
    def info() -> Response:
        return _json(service.model.info)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(service.registry), content_type=CONTENT_TYPE_LATEST)

    @app.errorhandler(ServeError)
    def refuse(error: ServeError) -> Response:
        if request.endpoint != "ready":  # a probe's 503 is its answer, not a lost request
            service.metrics.rejected(error)
        return _json(error.body(), error.status)

    @app.errorhandler(HTTPException)
    def refuse_http(error: HTTPException) -> Response:
        code = (error.name or "error").lower().replace(" ", "_")
        message = f"{request.method} {request.path}: {error.name}"
        response = _json(error_body(message, "invalid_request_error", code), error.code or 500)
        if (allowed := getattr(error, "valid_methods", None)) is not None:
            response.headers["Allow"] = ", ".join(allowed)
        return response

    @app.errorhandler(Exception)
    def fail(error: Exception) -> Response:
        log.exception("a request failed", exc_info=error)
        return _json(ServeError("the server failed on this request").body(), 500)

    @app.after_request
    def log_access(response: Response) -> Response:
        log.info("%s %s %d", request.method, request.path, response.status_code)
        return response

    return app


def _json(data: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(data) + b"\n", status, content_type="application/json")


def _read_body(service: Service) -> bytes:
    """The body, whole. Raises for another type, and for one byte over the limit."""
    if flask.request.mimetype != "application/json":
        raise UnsupportedMediaType("the Content-Type must be application/json")
    limit = service.settings.max_body_bytes
    # Not through Flask: its limit cuts a chunked body short in silence.
    body: bytes = request.environ["wsgi.input"].read(limit + 1)
    if len(body) > limit:
        raise PayloadTooLarge(f"the body is larger than {limit} bytes (MAX_BODY_BYTES)")
    if not body:
        raise InvalidRequest("the body is empty; a JSON object is expected")
    return body
