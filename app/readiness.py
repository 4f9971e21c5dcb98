"""Readiness, watched: what turns it off is one line of the log, and what brings it back another.

Belongs to the hub. What readiness is, the service says; this only tells of its changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import gevent

from .errors import Draining, NotReady

log = logging.getLogger(__name__)

_PERIOD_SECONDS = 1.0


class Readiness:
    """`check` raises NotReady, with the reason, or Draining, which its signal has told already."""

    def __init__(
        self, check: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._check = check
        self._clock = clock
        self._was_ready = False
        self._lost_at: float | None = None

    @property
    def is_ready(self) -> bool:
        try:
            self._check()
        except NotReady:
            return False
        return True

    def look(self) -> None:
        """Tells of what has changed since the last look. A load is no loss."""
        try:
            self._check()
        except Draining:
            return
        except NotReady as error:
            if self._was_ready:
                log.warning("not ready any more: %s", error)
                self._lost_at = self._clock()
            self._was_ready = False
            return
        if not self._was_ready:
            lost = "" if self._lost_at is None else f", after {self._clock() - self._lost_at:.0f} s"
            log.info("ready%s", lost)
        self._was_ready = True

    def keep(self, sleep: Callable[[float], object] = gevent.sleep) -> None:
        """Every second, without end."""
        while True:
            sleep(_PERIOD_SECONDS)
            try:
                self.look()
            except Exception:
                log.exception("readiness cannot be looked at")
