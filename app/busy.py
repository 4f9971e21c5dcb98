"""How much of the time with work an engine spends inside the model, over the last seconds.

One thread writes, others read: what they share is replaced or appended, never changed half-way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 10


class BusyRatio:
    """Sums by whole seconds of `clock`, so that reading costs the same whatever a step takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # second, model seconds, seconds with work
        self._sums: deque[tuple[int, float, float]] = deque(maxlen=WINDOW_SECONDS + 1)

    def add(self, model_seconds: float, work_seconds: float) -> None:
        """A step has ended now: `work_seconds` since there was work or since the step before, of
        which `model_seconds` inside the model."""
        second = int(self._clock())
        if self._sums and self._sums[-1][0] == second:
            _, model, work = self._sums[-1]
            self._sums[-1] = (second, model + model_seconds, work + work_seconds)
        else:
            self._sums.append((second, model_seconds, work_seconds))

    def sums(self) -> tuple[float, float]:
        """Model seconds and seconds with work of the last `WINDOW_SECONDS`."""
        oldest = int(self._clock()) - WINDOW_SECONDS
        recent = [entry for entry in list(self._sums) if entry[0] >= oldest]
        return sum(entry[1] for entry in recent), sum(entry[2] for entry in recent)
