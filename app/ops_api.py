"""Routes for those who run the server: `/health/…` and `/metrics`."""

from __future__ import annotations

from flask import Blueprint, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from .http import json_response
from .service import Service

READY = "ops.ready"  # the endpoint: its 503 is an answer, not a refusal


def ops_routes(service: Service) -> Blueprint:
    routes = Blueprint("ops", __name__)

    @routes.get("/health/live")
    def live() -> Response:
        return json_response({"status": "live"})

    @routes.get("/health/ready")
    def ready() -> Response:
        service.check_ready()
        return json_response({"status": "ready", "model": service.current.model_names[0]})

    @routes.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(service.registry), content_type=CONTENT_TYPE_LATEST)

    return routes
