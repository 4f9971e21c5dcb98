"""The OpenAPI 3.1 document: the table of routes, and the schemas that pydantic makes of its models.

Nothing of it depends on the model that is loaded: it is built once, with the app.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from .config import VERSION
from .http import REQUEST_ID
from .limits import DECIMAL
from .responses import ErrorReply
from .routes import JSON, ROUTES, Route, is_open

Json = dict[str, Any]

_SCHEMAS = "#/components/schemas/"
ERRORS = {
    400: "The body, a field of it or a header is wrong; `param` names it.",
    401: "The request does not carry a key that is needed (`Authorization: Bearer KEY`).",
    403: "The server has no ADMIN_API_KEY.",
    404: "Another model than the one that is served.",
    408: "The body did not arrive in time.",
    409: "Another model is being loaded already.",
    413: "The body is larger than MAX_BODY_BYTES.",
    415: "The Content-Type is not application/json.",
    429: "Too much waits already (overloaded), or the API key's requests or tokens of a minute, or "
    "its open requests, are used up; `Retry-After` says for how many seconds.",
    500: "The model, or the server, failed on this request.",
    503: "The model is loading, hangs or has failed (not_ready), or the server ends (draining).",
    504: "The request's time was over before its first token.",
}
_ABOUT = (
    "Fields that are not listed are refused, and types are not converted. A wrong method is "
    "answered with 405 and `Allow`, an unknown path with 404, both with the same error object. An "
    "error after a stream's first event is one more event, and the stream ends. If the server has "
    "API keys, requests carry one (`Authorization: Bearer KEY`). Health and metrics may be on a "
    "port of their own (OPS_PORT)."
)


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # they repeat the field's name


def build_document() -> Json:
    """The whole document; raises nothing."""
    paths: Json = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "phi-serve", "version": VERSION, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "responses": {f"Error{status}": _error(status) for status in ERRORS},
            "headers": {
                "RequestId": {"schema": _REQUEST_ID_SCHEMA, "required": True},
                "RetryAfter": {"schema": {"type": "string", "pattern": "^[0-9]+$"}},
                "WwwAuthenticate": {"schema": {"type": "string", "const": "Bearer"}},
            },
            "securitySchemes": {
                "ApiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Only if the server has keys (API_KEYS, API_KEYS_FILE).",
                },
                "AdminKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The key of ADMIN_API_KEY.",
                },
            },
            "parameters": _PARAMETERS,
        },
    }


_REQUEST_ID_SCHEMA = {"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"}
_PARAMETERS: Json = {
    "RequestId": {
        "name": "X-Request-Id",
        "in": "header",
        "description": "1 to 128 letters, digits and . _ ~ : / + = @ -; names the request in "
        "its answer and the log; a random one if missing",
        "schema": _REQUEST_ID_SCHEMA,
    },
    "RequestTimeout": {
        "name": "X-Request-Timeout",
        "in": "header",
        "description": "seconds, at least 0.001, from the request's arrival to the end of its "
        "answer, at most the server's MAX_TIMEOUT_MS; the shorter of this and timeout_ms counts",
        "schema": {"type": "string", "pattern": f"^{DECIMAL.pattern}$"},
    },
    "Model": {
        "name": "name",
        "in": "path",
        "required": True,
        "description": "a name of the model that is served; it may hold slashes",
        "schema": {"type": "string", "minLength": 1},
    },
}


def _operation(route: Route) -> Json:
    operation: Json = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.group],
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in _parameters(route)],
        "responses": {"200": _success(route)}
        | {str(status): _ref("responses", f"Error{status}") for status in route.statuses},
    }
    if not is_open(route.path):
        operation["security"] = [{"ApiKey": []}, {}]
    if route.path.startswith("/admin/"):
        operation["security"] = [{"AdminKey": []}]
    if route.request is not None:
        content = {"schema": _schema(route.request), "example": route.example}
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    return operation


def _parameters(route: Route) -> list[str]:
    return [
        *(["Model"] if "{name}" in route.path else []),
        "RequestId",
        *(["RequestTimeout"] if 504 in route.errors else []),
    ]


def _success(route: Route) -> Json:
    whole = {"type": "object" if route.media_type == JSON else "string"}
    content = {route.media_type: {"schema": _schema(route.reply) if route.reply else whole}}
    if route.event is not None:
        content["text/event-stream"] = {"schema": _event(route.event, route.ends_with_done)}
    return {"description": route.summary, "headers": _HEADERS, "content": content}


def _event(model: type[BaseModel], ends_with_done: bool) -> Json:
    """Of a stream OpenAPI 3.1 can only say what each event is; its `data` is JSON in a string."""
    held = {"anyOf": [_schema(model), _schema(ErrorReply)]}
    data: Json = {"type": "string", "contentMediaType": JSON, "contentSchema": held}
    if ends_with_done:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


_HEADERS = {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}}
_MORE_HEADERS = {
    401: {"WWW-Authenticate": {"$ref": "#/components/headers/WwwAuthenticate"}},
    429: {"Retry-After": {"$ref": "#/components/headers/RetryAfter"}},
}


def _error(status: int) -> Json:
    content = {JSON: {"schema": _schema(ErrorReply)}}
    headers = _HEADERS | _MORE_HEADERS.get(status, {})
    return {"description": ERRORS[status], "headers": headers, "content": content}


def _ref(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}


def _schema(model: type[BaseModel]) -> Json:
    return {"$ref": _SCHEMAS + model.__name__}


def _schemas() -> Json:
    models: list[type[BaseModel]] = [ErrorReply]
    models += (m for r in ROUTES for m in (r.request, r.reply, r.event) if m)
    _, made = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)],
        ref_template=_SCHEMAS + "{model}",
        schema_generator=_Untitled,
    )
    schemas: Json = made["$defs"]
    _tidy(schemas)
    return schemas


def _tidy(node: Any) -> None:
    """In place: says what pydantic means but leaves out, and not that what is missing is null."""
    if isinstance(node, dict):
        if "patternProperties" in node:
            node.setdefault("additionalProperties", False)
        if node.get("default", ...) is None:
            del node["default"]
        for each in node.values():
            _tidy(each)
    elif isinstance(node, list):
        for each in node:
            _tidy(each)
