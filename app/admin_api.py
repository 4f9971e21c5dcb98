"""`/admin/model`: which model is served, and the switch to another one, for whoever has the key."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

from flask import Blueprint, Response

from .errors import AdminOff, InvalidApiKey
from .generate_requests import SwitchRequest
from .guard import bearer_secret
from .http import json_response, read_request
from .keys import digest_of
from .served import Served
from .service import Service
from .switch import loading_model, switch_model


def admin_routes(service: Service) -> Blueprint:
    routes = Blueprint("admin", __name__, url_prefix="/admin")

    @routes.before_request
    def check_key() -> None:
        _check_key(service.settings.admin_api_key)

    @routes.get("/model")
    def tell() -> Response:
        told = _describe(service.current) | {
            "loading": loading_model(service),
            "retiring": [_describe(served) for served in service.retiring],
        }
        return json_response(told)

    @routes.post("/model")
    def switch() -> Response:
        asked = read_request(SwitchRequest, service.settings)
        switched = switch_model(service, Path(asked.path), is_forced=bool(asked.force))
        told = {"switched": switched.is_new, "seconds": round(switched.seconds, 3)}
        return json_response(told | _describe(switched.served))

    return routes


def _check_key(key: str) -> None:
    """Raises AdminOff and InvalidApiKey; the body has not been read."""
    if not key:
        raise AdminOff("this server has no ADMIN_API_KEY: its model cannot be switched over HTTP")
    # Digests are of one length: how long the comparison takes tells nothing of the key's.
    if not hmac.compare_digest(digest_of(bearer_secret()), digest_of(key)):
        raise InvalidApiKey("the header Authorization: Bearer KEY must have ADMIN_API_KEY's key")


def _describe(served: Served) -> dict[str, Any]:
    folder = served.origin.folder if served.origin else served.settings.model_path
    return {"model": served.loaded.name if served.loaded else None, "path": str(folder)}
