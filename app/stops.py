"""Stop strings: where an answer's text ends before the model ends it.

Text comes in pieces; only a tail that could still become a stop string is held back, so what was
given out never has to be taken back, and the pieces join to the text in front of the stop.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache


class StopMatcher:
    """Feed it an answer's text in order. Once `is_stopped`, what follows is dropped.

    The text ends in front of the stop string that is complete first; of those that are complete
    at the same character, in front of the longest. However the text is cut, the result is one.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """`stops` are strings of at least one character."""
        self._stops = [_Progress(stop) for stop in stops]
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """What can be given out now."""
        if self.is_stopped or not self._stops:
            return "" if self.is_stopped else text
        text, num_held, self._held = self._held + text, len(self._held), ""
        ends = [(stop.feed(text, num_held), stop) for stop in self._stops]
        found = [(end, end - len(stop.stop)) for end, stop in ends if end is not None]
        if found:
            self.is_stopped = True
            return text[: min(found)[1]]
        cut = len(text) - max(stop.num_matched for stop in self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The answer has ended otherwise: what was held back is text after all."""
        held, self._held = self._held, ""
        return held


class _Progress:
    """How much of one stop string the text so far ends with: Knuth, Morris and Pratt's search, so
    that a character costs the same however long the string is."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = _shorter_matches(stop)

    def feed(self, text: str, start: int) -> int | None:
        """The place in `text` behind the stop, if it is complete; `text` is new from `start` on."""
        stop, n = self.stop, self.num_matched
        if not n and text.find(stop[0], start) < 0:
            return None
        for at in range(start, len(text)):
            n = _longer(stop, self._shorter, n, text[at])
            if n == len(stop):
                return at + 1
        self.num_matched = n
        return None


@lru_cache(maxsize=64)  # the choices of a request have the same stops
def _shorter_matches(stop: str) -> list[int]:
    """Of each prefix, how long the longest shorter one is that it ends with."""
    table = [0] * len(stop)
    for at in range(1, len(stop)):
        table[at] = _longer(stop, table, table[at - 1], stop[at])
    return table


def _longer(stop: str, shorter: list[int], n: int, char: str) -> int:
    """How many characters match once `char` has come, of `n` before."""
    while n and stop[n] != char:
        n = shorter[n - 1]
    return n + (stop[n] == char)


def overlap(text: str, marker: str) -> int:
    """How many of the last characters of `text` are the first ones of `marker`, but not all; for a
    short one, it tries them all."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
