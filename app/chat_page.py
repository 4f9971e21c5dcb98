"""The page at `/`: the files of `app/page`, served from memory as they are.

Nothing is built and nothing comes from elsewhere. Whoever has the address may have the page, as
`/docs`; what it asks the server for may need an API key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from flask import Blueprint, Response, abort, request

_INDEX = "index.html"
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind} 'self'" for kind in ("script-src", "style-src", "connect-src", "img-src")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
    )
)
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked for again: a new server may have a new page
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class PageFile:
    content: bytes
    content_type: str
    etag: str


def read_page() -> dict[str, PageFile]:
    """By name: all that a browser may ask for."""
    assert __package__ is not None
    return {
        entry.name: _read(entry.name, entry.read_bytes())
        for entry in files(__package__).joinpath("page").iterdir()
        if entry.name.rpartition(".")[2] in _TYPES
    }


def page_routes() -> Blueprint:
    routes = Blueprint("page", __name__)
    page = read_page()

    @routes.get("/")
    def index() -> Response:
        return _send(page[_INDEX])

    @routes.get("/page/<name>")
    def file(name: str) -> Response:
        if name == _INDEX or name not in page:
            abort(404)
        return _send(page[name])

    return routes


def _read(name: str, content: bytes) -> PageFile:
    return PageFile(content, _TYPES[name.rpartition(".")[2]], hashlib.sha256(content).hexdigest())


def _send(file: PageFile) -> Response:
    response = Response(file.content, content_type=file.content_type, headers=_HEADERS)
    response.set_etag(file.etag)
    response.make_conditional(request)
    return response
