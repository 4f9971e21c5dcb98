"""How many tokens of a prompt the next step reads. Pure: no I/O, clock, thread or array.

While no row decodes, as many as may be read at once. Beside open streams two things are good: a
chunk that takes at most `stall` times what their decoding takes, for then each step is a little
longer; and a large one in one step of twenty, for then the other nineteen are as short as ever.
Far behind in a long prompt a small chunk takes as long as a larger one, since any looks at all that
is in front of it; so what reads the prompt faster is taken. What is long comes out of an allowance
that each step adds to, so a short prompt that comes alone is read at once.
"""

from __future__ import annotations

import statistics
from collections import deque

from .sequence import StepPlan

_UNIT = 8  # tokens, the least chunk: a smaller one takes hardly less time
_LARGE = 48  # tokens, from which on a chunk tells nothing of small ones
_NUM_DECODES = 31  # runs of which the median counts
_ZONE = 512  # positions for which a token's time is one number; a longer prompt is a long one
_SHORT = 2.0  # times `stall` for a prompt that is not long, for with it that soon ends
_WEIGHT = 0.4  # of a new chunk in that number
_GROWTH = 1.5  # from one small chunk to the next, at most
_TOKENS_PER_DECODE = 16  # read in the time that a row takes to decode: a guess until it is known
_STEPS_PER_LONG = 45  # so that 95 % of the steps are not long, nor those made so by noise
_MOST_LONG = 2.0  # in a row, if none has been for long
_FORGETTING = 0.99  # of a small chunk's time in a step that waits: the machine may have changed


class PrefillBudget:
    """Chunks of at most `max_chunk` tokens; where `stall` is 0, always of that many.

    While more prompts wait than streams are open, a chunk may take longer by that ratio, and long
    steps come more often. Every prompt is read: the longest pause has `_STEPS_PER_LONG` steps.
    Times are in seconds.
    """

    def __init__(self, max_chunk: int, stall: float = 0.0) -> None:
        self.max_chunk = max_chunk
        self.stall = stall
        self._decodes: deque[float] = deque(maxlen=_NUM_DECODES)
        self._per_token: dict[tuple[bool, int], float] = {}  # large or small, zone -> seconds
        self._last_size = 0  # of a small chunk, if the step before had one
        self._num_long = _MOST_LONG  # that may come now
        self._is_long = False  # the step that was planned last
        self._shares = 1.0  # of that step

    def take(self, start: int, num_left: int, num_decoding: int, num_waiting: int = 0) -> int:
        """Tokens that the next step reads, of `num_left` from position `start` on, beside so many
        rows that decode; 0 in a step that waits."""
        most = min(num_left, self.max_chunk)
        if not (self.stall and num_decoding and self._decodes):
            return most
        self._shares = max(1.0, num_waiting / num_decoding)
        small = self._small(start, num_left)
        self._is_long = small < most and self._num_long >= 1
        if small == most or self._is_long:
            return most
        decode = statistics.median(self._decodes)
        rate = small / (decode + small * self._token_seconds(start, is_large=False))
        pause = decode * _STEPS_PER_LONG / self._shares
        large = self.max_chunk * self._token_seconds(start, is_large=True)
        if rate < self.max_chunk / (pause + large):
            zone = (False, start // _ZONE)
            if zone in self._per_token:
                self._per_token[zone] *= _FORGETTING
            return 0
        return small

    def guess(self, seconds: float) -> None:
        """That a step of one row takes, as long as none has been measured."""
        if not self._decodes and seconds > 0:
            self._decodes.append(seconds)

    def stepped(self, plan: StepPlan, seconds: float, prefill_seconds: float | None) -> None:
        """A step took `seconds`, of them its chunk `prefill_seconds`; None: nobody has measured."""
        chunk = plan.prefill
        if plan.decode:
            earned = self._num_long + self._shares / _STEPS_PER_LONG
            self._num_long = min(_MOST_LONG, earned)
        if chunk is None:
            self._decodes.append(seconds)
            self._last_size = 0
            return
        if prefill_seconds is not None:
            if plan.decode:
                self._decodes.append(seconds - prefill_seconds)
        else:
            is_known = plan.decode and self._decodes
            plain = statistics.median(self._decodes) if is_known else 0.0
            prefill_seconds = max(seconds - plain, seconds / 10)
        self._learn(chunk.start, len(chunk.token_ids), prefill_seconds)
        self._num_long -= self._is_long and bool(plan.decode)
        self._is_long = False

    def _small(self, start: int, num_left: int) -> int:
        """The chunk that takes no longer than each step may be made."""
        stall = self.stall * (_SHORT if start + num_left <= _ZONE else 1.0)
        allowed = self._shares * stall * statistics.median(self._decodes)
        size = allowed / self._token_seconds(start, is_large=False)
        if self._last_size:
            size = min(size, max(2 * _UNIT, _GROWTH * self._last_size))
        units = max(1, round(size / _UNIT))  # down only, a smaller chunk would never grow
        most = min(num_left, self.max_chunk)
        # A rest so small would not be worth a run of its own.
        return most if num_left < (units + 1) * _UNIT else min(units * _UNIT, most)

    def _learn(self, start: int, num_tokens: int, seconds: float) -> None:
        self._last_size = num_tokens if num_tokens < _LARGE else 0
        zone, each = (num_tokens >= _LARGE, start // _ZONE), max(seconds, 1e-6) / num_tokens
        known = self._per_token.get(zone, each)
        # One that took far too long, because the machine was elsewhere, counts for twice at most.
        self._per_token[zone] = known + _WEIGHT * (min(each, 2 * known) - known)

    def _token_seconds(self, start: int, *, is_large: bool) -> float:
        """Near `start`, or as far in front of it as is known; of the other size if of this none."""
        times, zone = self._per_token, start // _ZONE
        large = max((key for key in times if key[0] and key[1] <= zone), default=None)
        small = max((key for key in times if not key[0] and key[1] <= zone), default=None)
        known = small if large is None else large
        if known is None:
            return statistics.median(self._decodes) / _TOKENS_PER_DECODE
        if is_large or small is None:
            return times[known]
        # A small chunk's is never less.
        return max(times[small], times[known])
