"""Who may ask, and how much: a request's API key, and its place among those that the key may have.

Belongs to the hub. The key is looked at before the body is read; the place is held until the last
byte of the answer, however that ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import gevent
from flask import g, request

from .access import NOTE
from .closing import call_closing
from .errors import InvalidApiKey
from .key_ring import KeyRing
from .keys import Key
from .quota import Lease, Quotas
from .routes import is_open

log = logging.getLogger(__name__)

_LEASE = "phi_serve.lease"  # in the environ, to be found when the answer is closed
_PERIOD_SECONDS = 1.0


class Guard:
    def __init__(self, ring: KeyRing, quotas: Quotas) -> None:
        self._ring = ring
        self._quotas = quotas

    def check(self) -> None:
        """Before each request; sets `g.owner`, and of one that carries work (POST) `g.lease`.

        Raises InvalidApiKey and RateLimited.
        """
        # No route takes OPTIONS: it is refused as such, and a browser sends no key with it.
        if not self._ring.is_needed or is_open(request.path) or request.method == "OPTIONS":
            return
        key = self._key()
        g.owner = key.name
        request.environ.setdefault(NOTE, {})["owner"] = key.name
        if request.method == "POST":
            g.lease = self._quotas.admit(key.name, key.limits)
            request.environ[_LEASE] = g.lease

    def releasing(self, app: Any) -> Any:
        """A WSGI app: `app`, whose requests give their place back when their answers are closed."""

        def released(environ: dict[str, Any], start_response: Any) -> Any:
            def release() -> None:
                lease: Lease | None = environ.pop(_LEASE, None)
                if lease is not None:
                    lease.end()

            return call_closing(app, environ, start_response, release)

        return released

    def keep(self, sleep: Callable[[float], object] = gevent.sleep) -> None:
        """Every second, without end: takes over changed keys, and charges what was generated. One
        that fails is tried again the next second, and holds up neither the other nor the loop."""
        while True:
            sleep(_PERIOD_SECONDS)
            for work in (self._ring.refresh, self._quotas.settle):
                try:
                    work()
                except Exception:
                    log.exception("keys: %s failed", work.__name__)

    def forgive(self) -> None:
        """This request was refused for no fault of its key's: it does not count."""
        lease: Lease | None = g.get("lease")
        if lease is not None:
            lease.cancel()

    def _key(self) -> Key:
        if not (secret := bearer_secret()):
            raise InvalidApiKey("an API key is needed, in the header Authorization: Bearer KEY")
        if (key := self._ring.find(secret)) is None:
            raise InvalidApiKey("the API key is not one that this server knows")
        return key


def bearer_secret() -> str:
    """Of the request's `Authorization: Bearer SECRET`; empty if there is none."""
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""
