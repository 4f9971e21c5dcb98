"""`/openapi.json` and `/docs`: the document as it is, and as one page that needs nothing else, not
even JavaScript."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from flask import Blueprint, Response
from jinja2 import Environment, PackageLoader, StrictUndefined

from .http import json_response
from .openapi import Json, build_document

Parts = list[tuple[str, str | None]]  # text, and the anchor that it links to

_ADDRESS = "http://localhost:8080"
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "maxProperties": "at most {}",
    "pattern": "like {}",
}


@dataclass(frozen=True)
class FieldRow:
    name: str
    parts: Parts
    is_required: bool
    default: str
    meaning: str


def docs_routes() -> Blueprint:
    routes = Blueprint("docs", __name__)
    document = build_document()
    page = render(document)

    @routes.get("/openapi.json")
    def openapi() -> Response:
        return json_response(document)

    @routes.get("/docs")
    def docs() -> Response:
        return Response(page, content_type="text/html; charset=utf-8")

    return routes


def render(document: Json) -> str:
    """The page of an OpenAPI document that is written as ours is."""
    environment = Environment(
        loader=PackageLoader("app"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    info, components = document["info"], document["components"]
    return environment.get_template("docs.html").render(
        title=info["title"],
        version=info["version"],
        about=info["description"],
        routes=[
            _route(method, path, operation, components)
            for path, item in document["paths"].items()
            for method, operation in item.items()
        ],
        objects=[
            {
                "name": name,
                "target": f"object-{name}",
                "meaning": schema.get("description", ""),
                "fields": _fields(schema),
            }
            for name, schema in sorted(components["schemas"].items())
        ],
    )


def curl(method: str, path: str, body: Json | None) -> str:
    """A command that asks for it, with `body` as JSON."""
    command = f"curl -s {_ADDRESS}{path.replace('{name}', 'NAME')}"
    if body is None:
        return command
    return f"{command} -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"


def _route(method: str, path: str, operation: Json, components: Json) -> Json:
    content = operation.get("requestBody", {}).get("content", {})
    body = content.get("application/json", {})
    parameters = [_resolved(each, components) for each in operation["parameters"]]
    schema = _resolved(body.get("schema", {}), components)
    return {
        "name": operation["operationId"],
        "method": method.upper(),
        "path": path,
        "summary": operation["summary"],
        "curl": curl(method, path, body.get("example")),
        "parameters": [
            _field(each["name"], each["schema"] | {"description": each["description"]}, each)
            for each in parameters
        ],
        "fields": _fields(schema),
        "answers": [
            {
                "status": status,
                "media_type": media_type,
                "parts": list(_parts(sent["schema"])),
                "meaning": answer["description"],
            }
            for status, reference in operation["responses"].items()
            for answer in [_resolved(reference, components)]
            for media_type, sent in answer["content"].items()
        ],
    }


def _fields(schema: Json) -> list[FieldRow]:
    required = schema.get("required", ())
    return [
        _field(name, each, {"required": name in required})
        for name, each in schema.get("properties", {}).items()
    ]


def _field(name: str, schema: Json, owner: Json) -> FieldRow:
    default = json.dumps(schema["default"]) if "default" in schema else ""
    meaning = schema.get("description", "")
    parts = list(_parts(schema, shows_limits=not meaning))  # descriptions state them
    return FieldRow(name, parts, bool(owner.get("required")), default, meaning)


def _resolved(node: Json, components: Json) -> Json:
    """What a reference into the components refers to; anything else as it is."""
    if "$ref" not in node:
        return node
    *_, kind, name = node["$ref"].split("/")
    found: Json = components[kind][name]
    return found


def _parts(schema: Json, *, shows_limits: bool = False) -> Iterator[tuple[str, str | None]]:
    """A schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield name, f"object-{name}"
    elif options := schema.get("anyOf") or schema.get("oneOf"):
        for index, option in enumerate(options):
            if index:
                yield " or ", None
            yield from _parts(option, shows_limits=shows_limits)
    elif "contentSchema" in schema:
        yield from _parts(schema["contentSchema"])
    elif event := schema.get("properties", {}).get(
        "data"
    ):  # the only object that is not referred to
        yield from _parts(event)
    elif "const" in schema:
        yield json.dumps(schema["const"]), None
    elif "enum" in schema:
        yield ", ".join(json.dumps(each) for each in schema["enum"]), None
    else:
        yield schema.get("type", "anything"), None
        for inner in (schema.get("items"), *schema.get("patternProperties", {}).values()):
            if inner:
                yield " of ", None
                yield from _parts(inner, shows_limits=shows_limits)
        limits = [words.format(schema[key]) for key, words in _LIMITS.items() if key in schema]
        if limits and shows_limits:
            yield f" ({', '.join(limits)})", None
