"""Pages of other origins (CORS): which may ask from a browser, and what they may send and see.

Off unless origins are set. A browser asks first, with OPTIONS and without a key.
"""

from __future__ import annotations

import re

from flask import Response, request

_METHODS = "GET, POST"
_HEADERS = "Authorization, Content-Type, X-Request-Id, X-Request-Timeout"
_EXPOSED = "X-Request-Id, Retry-After"
_MAX_AGE_SECONDS = 7200  # as long as browsers keep it
# What OpenAI's client for browsers adds to each request.
_CLIENTS_OWN = re.compile(r"x-stainless-[a-z-]{1,40}")


class Cors:
    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = origins

    def preflight(self) -> Response | None:
        """The answer to a browser's question; None if it is none, or not of such an origin."""
        asks = request.headers.get("Access-Control-Request-Method")
        allowed = self._allowed(request.headers.get("Origin"))
        if request.method != "OPTIONS" or asks is None or allowed is None:
            return None
        wanted = request.headers.get("Access-Control-Request-Headers", "").lower().split(",")
        added = [name.strip() for name in wanted if _CLIENTS_OWN.fullmatch(name.strip())]
        return Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": _METHODS,
                "Access-Control-Allow-Headers": ", ".join([_HEADERS, *added]),
                "Access-Control-Max-Age": str(_MAX_AGE_SECONDS),
            },
        )

    def tell(self, response: Response) -> Response:
        """Adds to an answer, an error too, what lets such a page read it."""
        for name, value in self.headers(request.headers.get("Origin")).items():
            response.headers.add(name, value)
        return response

    def headers(self, origin: str | None) -> dict[str, str]:
        """Likewise for answers that are none of the app's."""
        said = {}
        if self._origins and self._origins != ("*",):
            said["Vary"] = "Origin"  # for others it lacks the lines below
        if (allowed := self._allowed(origin)) is not None:
            said["Access-Control-Allow-Origin"] = allowed
            said["Access-Control-Expose-Headers"] = _EXPOSED
        return said

    def _allowed(self, origin: str | None) -> str | None:
        if origin is None:
            return None
        if self._origins == ("*",):
            return "*"
        return origin if origin in self._origins else None
