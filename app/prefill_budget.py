"""How many tokens of a prompt the next step reads. Pure: no I/O, clock, thread or array.

While no row decodes, as many as may be read at once. Beside open streams a chunk may take `stall`
times what their decoding takes. What a token takes is known from the chunks before: more the
further on it stands, for it looks at all in front of it, and more in a small chunk than in a large
one. So the size follows the time of the last chunk near that position, by bounded steps.
"""

from __future__ import annotations

import statistics
from collections import deque

from .sequence import StepPlan

_UNIT = 8  # tokens, the least chunk: a smaller one takes hardly less time
_NUM_DECODES = 31  # runs of which the median counts
_ZONE = 512  # positions for which a token's time is one number
_WEIGHT = 0.4  # of a new chunk in that number
_GROWTH = 1.5  # from one chunk to the next, at most
_TOKENS_PER_DECODE = 16  # read in the time that a row takes to decode: a guess until it is known


class PrefillBudget:
    """Chunks of at most `max_chunk` tokens; where `stall` is 0, always of that many.

    Even the smallest chunk reads on, so every prompt is read. While more prompts wait than streams
    are open, a chunk may take longer, by that ratio. Times are in seconds.
    """

    def __init__(self, max_chunk: int, stall: float = 0.0) -> None:
        self.max_chunk = max_chunk
        self.stall = stall
        self._decodes: deque[float] = deque(maxlen=_NUM_DECODES)
        self._per_token: dict[int, float] = {}  # zone -> seconds
        self._last_size = 0  # of a chunk beside open streams, if the step before had one

    def take(self, start: int, num_left: int, num_decoding: int, num_waiting: int = 0) -> int:
        """Tokens that the next step reads, at least 1: of `num_left` from position `start` on,
        beside so many rows that decode."""
        most = min(num_left, self.max_chunk)
        if not (self.stall and num_decoding and self._decodes):
            return most
        shares = max(1.0, num_waiting / num_decoding)
        allowed = shares * self.stall * statistics.median(self._decodes)
        size = allowed / self._token_seconds(start)
        if self._last_size:
            size = min(size, max(2 * _UNIT, _GROWTH * self._last_size))
        units = max(1, round(size / _UNIT))  # down only, a smaller chunk would never grow
        # A rest so small would not be worth a run of its own.
        return most if num_left < (units + 1) * _UNIT else min(units * _UNIT, most)

    def guess(self, seconds: float) -> None:
        """That a step of one row takes, as long as none has been measured."""
        if not self._decodes and seconds > 0:
            self._decodes.append(seconds)

    def stepped(self, plan: StepPlan, seconds: float, prefill_seconds: float | None) -> None:
        """A step took `seconds`, of them its chunk `prefill_seconds`; None: nobody has measured."""
        chunk = plan.prefill
        if chunk is None:
            self._decodes.append(seconds)
            self._last_size = 0
            return
        if prefill_seconds is not None:
            if plan.decode:
                self._decodes.append(seconds - prefill_seconds)
        else:
            plain = statistics.median(self._decodes) if plan.decode and self._decodes else 0.0
            prefill_seconds = max(seconds - plain, seconds / 10)
        self._last_size = len(chunk.token_ids) if plan.decode else 0
        zone, each = chunk.start // _ZONE, prefill_seconds / len(chunk.token_ids)
        known = self._per_token.get(zone, each)
        # One that took far too long, because the machine was elsewhere, counts for twice at most.
        self._per_token[zone] = known + _WEIGHT * (min(each, 2 * known) - known)

    def _token_seconds(self, start: int) -> float:
        """Near `start`, or as far in front of it as is known."""
        zones = [zone for zone in self._per_token if zone <= start // _ZONE]
        if zones:
            return self._per_token[max(zones)]
        return statistics.median(self._decodes) / _TOKENS_PER_DECODE
