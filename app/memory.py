"""How many bytes the KV cache may take, as the machine's free memory comes and goes.

Pure: what is free is asked of a function, the time of a clock. Knows nothing of rows; whoever grows
the cache compares the sum of its claims with `update`, also of those that are not allocated yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_READ_SECONDS = 1.0  # between two readings
# A rise has to be larger than noise of 3 % either way could make it (1.03 / 0.97 = 1.062), and to
# last: other processes let go of memory only to take it again.
_MARGIN = 1 / 16
_RISE_SECONDS = 5.0


class MemoryBudget:
    """A share of the memory that is free or the cache's own, less a reserve.

    What is missing lowers it at the next reading. It rises only once all readings of some seconds
    have been higher by a margin, and to the lowest of these. So noise lowers it by its own width at
    most, and never makes it swing.
    """

    def __init__(
        self,
        read_free: Callable[[], int],
        share: float,
        reserve: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read_free` tells the bytes that anybody could take now; what it raises is logged once,
        and the last reading stands. `reserve`: bytes of the share that others need (logits)."""
        self._read_free = read_free
        self._share = share
        self._reserve = reserve
        self._clock = clock
        self._usable: int | None = None  # free, and the cache's own; None: never read
        self._read_at = -_READ_SECONDS
        self._higher_since: float | None = None
        self._lowest_rise = 0  # of the readings since then
        self._has_failed = False

    def update(self, held: int) -> int:
        """Bytes that the cache may take in all; `held` of them it has taken from the machine (on a
        CPU the pages it has touched). Asks the machine once a second at the most.

        0 leaves nothing: that one row must run all the same is the caller's business. While nothing
        could be read yet, the cache may keep what it holds.
        """
        now = self._clock()
        if now - self._read_at >= _READ_SECONDS:
            self._read_at = now
            self._read(held, now)
        if self._usable is None:
            return held
        return max(0, int(self._share * self._usable) - self._reserve)

    def _read(self, held: int, now: float) -> None:
        try:
            usable = self._read_free() + held
        except Exception as error:  # each library has errors of its own
            if not self._has_failed:
                log.warning("free memory cannot be read: %s; the last number stands", error)
            self._has_failed = True
            return
        if self._usable is None or usable <= self._usable:
            self._usable = usable
            self._higher_since = None
        elif usable < self._usable * (1 + _MARGIN):
            self._higher_since = None
        elif self._higher_since is None:
            self._higher_since, self._lowest_rise = now, usable
        else:
            self._lowest_rise = min(self._lowest_rise, usable)
            if now - self._higher_since >= _RISE_SECONDS:
                self._usable, self._higher_since = self._lowest_rise, None
