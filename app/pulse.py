"""What the engine thread is at, and since when: it writes, the hub reads.

A beat is progress: a step that read or wrote tokens. A prompt that is read in chunks beats with
each of them, so only a single step can be too long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Pulse:
    """Instants are of `clock`, in seconds. Thread-safe: each change is one assignment."""

    def __init__(
        self, max_step_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_step_seconds = max_step_seconds
        self._clock = clock
        self._stage = ("starting", clock())
        self._started_at = clock()
        self._beat_at: float | None = None  # None: it waits for work

    def enter(self, stage: str) -> None:
        """The load has come to `stage`."""
        self._stage = (stage, self._clock())
        log.info("loading: %s", stage)

    def beat(self) -> None:
        """There is work, and it goes on."""
        self._beat_at = self._clock()

    def rest(self) -> None:
        """There is no work."""
        self._beat_at = None

    @property
    def stage(self) -> str:
        """How far the load is, for people."""
        (name, since), now = self._stage, self._clock()
        return f"{name} for {now - since:.0f} s, {now - self._started_at:.0f} s in all"

    @property
    def stalled_seconds(self) -> float | None:
        """How long there has been work and no progress; None as long as that may be."""
        beat_at = self._beat_at
        if beat_at is None or (seconds := self._clock() - beat_at) <= self._max_step_seconds:
            return None
        return seconds
