"""Which steps are slow, and a line of the log that tells what ran in one: one line in ten seconds
at the most, for where every step is slow they would be all that the log has."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .access import Line

_LINE_SECONDS = 10.0

log = logging.getLogger(__name__)


class SlowSteps:
    """Those that take longer than `threshold_seconds`."""

    def __init__(self, threshold_seconds: float, clock: Callable[[], float]) -> None:
        self._threshold = threshold_seconds
        self._clock = clock
        self._next_line_at = -_LINE_SECONDS
        self._num_untold = 0

    def ended(self, seconds: float, num_rows: int, num_prompt_tokens: int) -> bool:
        """A step has; was it slow? `num_prompt_tokens` are those that it read."""
        if seconds <= self._threshold:
            return False
        now = self._clock()
        if now < self._next_line_at:
            self._num_untold += 1
            return True
        self._next_line_at, num_untold, self._num_untold = now + _LINE_SECONDS, self._num_untold, 0
        log.info(
            Line(
                {
                    "message": "slow step",
                    "seconds": round(seconds, 4),
                    "rows": num_rows,
                    "prefill_tokens": num_prompt_tokens,
                    "others": num_untold,
                }
            )
        )
        return True
