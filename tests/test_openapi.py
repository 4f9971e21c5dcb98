"""The OpenAPI document against the app and its models, and the page that is made of it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import jsonschema_rs
import pytest
from flask import Flask
from schemathesis.specs.openapi.definitions import OPENAPI_31

from app.api import create_app
from app.config import VERSION
from app.docs_page import render
from app.openapi import build_document
from app.protocol import parse
from app.routes import ROUTES, Route, is_open
from app.service import Service

from .live import ROOT
from .services import SETTINGS

DOCUMENT = build_document()
ANSWERED_BY_FLASK = {"HEAD", "OPTIONS"}
FOR_BROWSERS = {("GET", "/"), ("GET", "/page/{name}")}


@pytest.fixture(scope="module")
def app() -> Flask:
    """Nothing is loaded: the document and its page come all the same."""
    return create_app(Service(SETTINGS))


def served_routes(app: Flask) -> set[tuple[str, str]]:
    return {
        (method, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - ANSWERED_BY_FLASK
    }


def test_every_route_is_documented_and_every_documented_route_is_there(app: Flask) -> None:
    documented = {
        (method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item
    }
    assert documented == served_routes(app) - FOR_BROWSERS
    assert len(documented) == len(ROUTES)


def test_document_is_what_the_app_serves(app: Flask) -> None:
    response = app.test_client().get("/openapi.json")
    assert (response.status_code, response.get_json()) == (200, DOCUMENT)


def test_document_is_valid_openapi() -> None:
    jsonschema_rs.Draft202012Validator(OPENAPI_31).validate(DOCUMENT)


def test_every_schema_is_a_valid_json_schema() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.meta.validate(
            schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        )


def test_every_reference_leads_somewhere_and_nothing_is_left_over() -> None:
    named = {ref for ref in references(DOCUMENT) if ref.startswith("#/components/")}
    there = {
        f"#/components/{kind}/{name}"
        for kind, each in DOCUMENT["components"].items()
        for name in each
    }
    schemes = {name for name in there if name.startswith("#/components/securitySchemes/")}
    assert named == there - schemes
    secured = {
        name
        for item in DOCUMENT["paths"].values()
        for each in item.values()
        for scheme in each.get("security", ())
        for name in scheme
    }
    assert secured == {"AdminKey", "ApiKey"}


def test_routes_that_need_a_key_say_so_and_how_they_refuse() -> None:
    for route in ROUTES:
        operation = DOCUMENT["paths"][route.path][route.method.lower()]
        needs_one = not is_open(route.path)
        has_its_own = route.path.startswith("/admin/")
        needs_any = needs_one or has_its_own
        assert ("security" in operation) == ("401" in operation["responses"]) == needs_any
        assert ("429" in operation["responses"]) == (needs_one and route.method == "POST")


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for each in node:
            yield from references(each)


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION


def test_unknown_fields_are_forbidden_everywhere_but_where_people_put_their_own() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert {
        name for name, schema in schemas.items() if schema.get("additionalProperties") is not False
    } == {"InfoReply"}


@pytest.mark.parametrize("route", [r for r in ROUTES if r.request], ids=lambda r: r.name)
def test_example_is_a_valid_request(route: Route) -> None:
    assert route.request is not None
    parse(route.request, json.dumps(route.example).encode())


# --- the page -------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Its text, its ids, what it links to, and whether its tags are balanced."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.targets: set[str] = set()
        self.codes: set[str] = set()
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self._open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "action", "data", "srcset"):
                self.targets.add(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open[-1:] == ["code"]:
            self.codes.add(data)


@pytest.fixture(scope="module")
def page(app: Flask) -> Page:
    response = app.test_client().get("/docs")
    assert (response.status_code, response.mimetype) == (200, "text/html")
    return Page(response.text)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_page_shows_the_route_its_fields_and_a_curl(page: Page, route: Route) -> None:
    assert f"{route.method} {route.path}" in page.codes
    assert route.name in page.ids
    assert f"curl -s http://localhost:8080{route.path.replace('{name}', 'NAME')}" in page.text
    if route.request is not None:
        fields = route.request.model_fields.items()
        assert {field.alias or name for name, field in fields} <= page.codes
        assert all(str(field.description) in page.text for _, field in fields)


def test_page_needs_nothing_from_elsewhere(page: Page) -> None:
    anchors = {f"#{id_}" for id_ in page.ids}
    assert len(page.ids) == len(set(page.ids))
    assert page.targets <= anchors | {"/openapi.json"}
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed"}
    assert "@import" not in page.text
    assert "url(" not in page.text


def test_page_escapes_what_the_document_says() -> None:
    hostile = json.loads(json.dumps(DOCUMENT))
    hostile["paths"]["/generate"]["post"]["summary"] = "<script>alert('x')</script>"
    assert "<script" not in render(hostile)
