"""The routes. Each reads a request, hands it on and frames the answer; one handler turns every
error into OpenAI's error object and counts it."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import orjson
from flask import Flask, Response, request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from . import protocol
from .errors import (
    InvalidRequest,
    NotReady,
    PayloadTooLarge,
    ServeError,
    UnreadableBody,
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
        answer = service.submit(parsed)
        deltas = iter(answer)
        if not parsed.stream:
            return _json(protocol.result(answer, deltas, model.name))
        # The first delta comes before the status: a failure until then is still a real 5xx.
        try:
            deltas = itertools.chain([next(deltas)], deltas)
        except Exception:
            answer.abort()
            raise
        return Response(protocol.events(answer, deltas, model.name), headers=_SSE_HEADERS)

    @app.get("/health/live")
    def live() -> Response:
        return _json({"status": "live"})

    @app.get("/health/ready")
    def ready() -> Response:
        if not service.bridge.is_ready:
            raise NotReady(service.bridge.why_not_ready)
        return _json({"status": "ready", "model": service.model.name})

    @app.get("/info")
    def info() -> Response:
        return _json(service.model.info)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(service.registry), content_type=CONTENT_TYPE_LATEST)

    @app.errorhandler(Exception)
    def refuse(error: Exception) -> Response:
        status, body = _describe(error)
        if request.endpoint != "ready":  # a probe's 503 is its answer, not a lost request
            service.metrics.rejected(body["error"]["code"])
        response = _json(body, status)
        if isinstance(error, MethodNotAllowed) and error.valid_methods:
            response.headers["Allow"] = ", ".join(error.valid_methods)
        if isinstance(error, UnreadableBody | PayloadTooLarge):
            response.headers["Connection"] = "close"  # where the next request begins is unknown
        return response

    @app.after_request
    def log_access(response: Response) -> Response:
        log.info("%s %r %d", request.method, request.path, response.status_code)
        return response

    return app


def _describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and error object; of an error that nobody foresaw the client learns nothing more."""
    if isinstance(error, ServeError):
        return error.status, error.body()
    if isinstance(error, HTTPException) and error.code is not None:
        code = error.name.lower().replace(" ", "_")
        message = f"{request.method} {request.path}: {error.name}"
        return error.code, error_body(message, "invalid_request_error", code)
    log.exception("a request failed", exc_info=error)
    return 500, ServeError("the server failed on this request").body()


def _json(fields: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(fields) + b"\n", status, content_type="application/json")


def _read_body(service: Service) -> bytes:
    """The body, whole. Raises for another type, one byte over the limit, and broken framing."""
    if request.mimetype != "application/json":
        raise UnsupportedMediaType("the Content-Type must be application/json")
    limit = service.settings.max_body_bytes
    try:
        # Not through Flask: its limit cuts a chunked body short in silence.
        body: bytes = request.environ["wsgi.input"].read(limit + 1)
    except OSError as error:
        raise UnreadableBody(f"the body cannot be read: {error}") from None
    if len(body) > limit:
        raise PayloadTooLarge(f"the body is larger than {limit} bytes (MAX_BODY_BYTES)")
    if not body:
        raise InvalidRequest("the body is empty; a JSON object is expected")
    return body
