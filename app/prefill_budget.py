"""How many tokens of a prompt the next step reads. Pure: no I/O, clock, thread or array.

While no row decodes, as many as may be read at once. Beside open streams a chunk may add `stall`
times what their decoding takes alone. What a chunk takes is learned from the steps: it grows with
its tokens and with their position, for each looks at all in front of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Ordered

from .sequence import Sequence, StepPlan
from .step_cost import StepCost

# Few, so that noise does not change them all the time; attention likes multiples of 16.
_SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, *(1 << k for k in range(8, 17)))
_FIRST_SHARES = 2.0  # for the first chunk behind steps that had nothing to read
_LEAST_SHARE = 0.25  # that a chunk's tokens take, of what its run takes without them
_STEPS_TO_LOOK = 32  # then one step only decodes: what that takes alone is to stay known
_DECODE_MEMORY, _CHUNK_MEMORY = 24, 32  # steps
# In units of a step of one token, as features below: a guess until there are steps. From the
# default model, with 2 cores of a Xeon with AMX.
_DECODE = (0.8, 0.08, 0.3)
_CHUNK = (0.9, 0.4, 0.035, 0.035)
# Small chunks do not tell what a token costs; if that did not fade, larger ones were never tried.
_CHUNK_FADES = (1.0, 1.0, 0.95, 0.95)


class PrefillBudget:
    """Chunks of at most `max_chunk` tokens; where `stall` is 0, always of that many.

    Even the smallest chunk reads on, so every prompt is read. While more prompts wait than streams
    are open, a chunk may add more, by that ratio.
    """

    def __init__(self, max_chunk: int, stall: float = 0.0) -> None:
        self.max_chunk = max_chunk
        self.stall = stall
        self._sizes = [size for size in _SIZES if size < max_chunk] + [max_chunk]
        self._decode = StepCost(_DECODE, _DECODE_MEMORY)
        self._chunk = StepCost(_CHUNK, _CHUNK_MEMORY, _CHUNK_FADES)
        self._is_guessed = False
        self._has_rested = True
        self._num_shared = 0  # steps in a row that read and decoded

    def take(
        self, start: int, num_left: int, decode: Ordered[Sequence], num_waiting: int = 0
    ) -> int:
        """Tokens that the next step reads, of `num_left` from position `start` on, beside these
        rows; 0 in a step that is to read none."""
        if not (self.stall and decode and self._is_guessed):
            return min(num_left, self.max_chunk)
        if self._num_shared >= _STEPS_TO_LOOK:
            return 0
        shares = max(1.0, num_waiting / len(decode)) * (_FIRST_SHARES if self._has_rested else 1.0)
        size = self._size_within(shares * self.stall * self._decode.of(_rows(decode)), start)
        if num_left <= size + self._sizes[0]:  # a rest so small would not be worth its run
            size = num_left
        return min(size, self.max_chunk)

    def guess(self, seconds: float) -> None:
        """That a step of one token takes, as long as none has been measured."""
        if seconds > 0:
            self._is_guessed = True
            self._decode.guess((1.0, 1.0, 0.0), seconds)
            self._chunk.guess(_tokens(0, 1), seconds)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step has run, and nobody's rows have failed in it."""
        if not self.stall:
            return
        if not self._is_guessed:
            self.guess(seconds)
        chunk = plan.prefill
        if chunk is None:
            self._has_rested = self._num_shared < _STEPS_TO_LOOK
            self._num_shared = 0
            self._decode.learn(_rows(plan.decode), seconds)
            return
        self._has_rested = False
        self._num_shared = self._num_shared + 1 if plan.decode else 0
        known = self._decode.of(_rows(plan.decode)) if plan.decode else 0.0
        self._chunk.learn(_tokens(chunk.start, len(chunk.token_ids)), seconds, known)

    def _size_within(self, seconds: float, start: int) -> int:
        """The largest chunk that takes no longer, or the least that is worth a run of its own."""
        fixed = self._chunk.of(_tokens(start, 0))
        per_token = self._chunk.of(_tokens(start, 1)) - fixed
        for_tokens = max(seconds - fixed, _LEAST_SHARE * fixed)
        if per_token * self.max_chunk <= for_tokens:
            return self.max_chunk
        num_tokens = for_tokens / per_token
        return self._sizes[max(0, bisect_right(self._sizes, num_tokens) - 1)]


def _rows(decode: Ordered[Sequence]) -> tuple[float, ...]:
    """Of a decode run: once, for each row, for each thousand tokens that the rows look at."""
    return (1.0, float(len(decode)), sum([s.num_cached for s in decode]) / 1000)


def _tokens(start: int, num_tokens: int) -> tuple[float, ...]:
    """Of a chunk: once, for each thousand tokens in front; the same for each of its tokens."""
    middle = (start + num_tokens / 2) / 1000
    return (1.0, start / 1000, float(num_tokens), num_tokens * middle)
