"""Routes for those who run the server: `/health/…` and `/metrics`."""

from __future__ import annotations

from operator import itemgetter

from flask import Blueprint, Response, request

from .exposition import expose
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
        # Werkzeug has those with the most parameters first.
        ranked = sorted(request.accept_mimetypes, key=itemgetter(1), reverse=True)
        accepted = [kind for kind, quality in ranked if quality > 0]
        body, content_type = expose(service.exposed, accepted)
        return Response(body, content_type=content_type, headers={"Vary": "Accept"})

    return routes
