"""The app: its routes put together, and one handler that turns every error into OpenAI's error
object and counts it. Health and metrics may have an app of their own, for a port of their own."""

from __future__ import annotations

import logging
from typing import Any

from flask import Flask, Response, g, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from .admin_api import admin_routes
from .chat_page import page_routes
from .config import VERSION, Settings
from .cors import Cors
from .docs_page import docs_routes
from .errors import (
    ClientLeft,
    NotReady,
    Overloaded,
    PayloadTooLarge,
    ServeError,
    UnreadableBody,
    error_body,
)
from .generate_api import generate_routes
from .http import begin_request, give_back, json_response, note
from .openai_api import openai_routes
from .ops_api import READY, ops_routes
from .service import Service
from .switch import loading_folder

log = logging.getLogger(__name__)


def create_app(service: Service) -> Flask:
    app = _new_app(service)
    app.wsgi_app = service.drain.counting(app.wsgi_app)  # type: ignore[method-assign]
    app.wsgi_app = service.guard.releasing(app.wsgi_app)  # type: ignore[method-assign]
    app.teardown_request(give_back)
    if service.settings.cors_origins:
        cors = Cors(service.settings.cors_origins)
        app.before_request(cors.preflight)
        app.after_request(cors.tell)
    app.register_blueprint(generate_routes(service))
    app.register_blueprint(openai_routes(service))
    app.register_blueprint(docs_routes())
    app.register_blueprint(page_routes())
    app.register_blueprint(admin_routes(service))
    if not service.settings.ops_port:
        app.register_blueprint(ops_routes(service))

    @app.before_request
    def take() -> None:
        service.guard.check()
        if request.method == "POST":
            service.drain.check()

    @app.get("/info")
    def info() -> Response:
        told = {"version": VERSION} | service.current.info | _limits(service.settings)
        return json_response(told | {"loading": loading_folder(service)})

    return app


def _limits(settings: Settings) -> dict[str, int]:
    """What a client has to know of them, beside the model's."""
    names = ("max_body_bytes", "max_timeout_ms", "max_connections")
    queue = ("max_queued_requests", "max_queued_tokens")
    return {name: getattr(settings, name) for name in (*names, *queue)}


def create_ops_app(service: Service) -> Flask:
    """Health and metrics alone, for the port OPS_PORT. Nobody needs a key."""
    app = _new_app(service)
    app.register_blueprint(ops_routes(service))
    return app


def _new_app(service: Service) -> Flask:
    """Without routes; a request has its id, and an error its answer."""
    app = Flask(__name__, static_folder=None)
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False  # OPTIONS is a method like any other
    app.url_map.merge_slashes = False  # `//` is another path, not one to be sent on from
    app.before_request(begin_request)

    @app.errorhandler(Exception)
    def refuse(error: Exception) -> Response:
        status, body = _describe(error)
        note(error=body["error"]["code"])
        if isinstance(error, Overloaded | NotReady):
            service.guard.forgive()
        # A probe's 503 is its answer, not a lost request; a client that left was not refused.
        if request.endpoint != READY and not isinstance(error, ClientLeft):
            service.metrics.rejected(body["error"]["code"])
        response = json_response(body, status)
        if isinstance(error, MethodNotAllowed) and error.valid_methods:
            response.headers["Allow"] = ", ".join(error.valid_methods)
        if isinstance(error, ServeError):
            response.headers.update(error.headers())
        if isinstance(error, UnreadableBody | PayloadTooLarge):
            response.headers["Connection"] = "close"  # where the next request begins is unknown
        return response

    @app.after_request
    def tell(response: Response) -> Response:
        response.headers["X-Request-Id"] = g.request_id
        if service.drain.is_announced:
            response.headers["Connection"] = "close"  # the next request should go elsewhere
        note(request_id=g.request_id)
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
    log.exception("request %s failed", g.request_id, exc_info=error)
    return 500, ServeError("the server failed on this request").body()
