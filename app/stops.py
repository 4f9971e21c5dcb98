"""Stop strings: where an answer's text ends before the model ends it.

Text comes in pieces; only a tail that could still become a stop string is held back, so what was
given out never has to be taken back, and the pieces join to the text in front of the stop.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Feed it an answer's text in order. Once `is_stopped`, what follows is dropped.

    The text ends in front of the stop string that is complete first; of those that are complete
    at the same character, in front of the longest. However the text is cut, the result is one.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """`stops` are strings of at least one character."""
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """What can be given out now."""
        if self.is_stopped or not self._stops:
            return "" if self.is_stopped else text
        text, self._held = self._held + text, ""
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)[1]]
        cut = len(text) - max(overlap(text, stop) for stop in self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The answer has ended otherwise: what was held back is text after all."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first ones of `stop`, but not all."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
