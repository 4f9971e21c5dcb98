"""One choice's events on their way from the hub's callback to the socket, past the answer's reader.

Most tokens are text and nothing else: their event is put together from what is ready. All others
take the way that the reader's deltas take. Belongs to the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import orjson

from .completion import Completion, Delta

if TYPE_CHECKING:
    from gevent.event import Event

    from .direct import Outlet
    from .sequence import Advance

_MARK = "\0text\0"
_MARKED = orjson.dumps(_MARK)
_MOST_QUOTED = 1 << 16
_LONGEST_QUOTED = 32  # characters: more than one token seldom has
_NO_TEXTS: Mapping[int, str] = MappingProxyType({})

_quoted: dict[str, bytes] = {}  # texts as JSON


class TextEvent:
    """Events that differ in one text only: the rest is written once. `frame_whole` makes such an
    event; behind the text no other may hold a text of the request's."""

    __slots__ = ("_frame_whole", "_head", "_tail")

    def __init__(self, frame_whole: Callable[[str], bytes]) -> None:
        self._frame_whole = frame_whole
        self._head = self._tail = b""

    def frame(self, text: str) -> bytes:
        if not self._head:
            self._head, _, self._tail = self._frame_whole(_MARK).rpartition(_MARKED)
        return self._head + (_quoted.get(text) or _quote(text)) + self._tail

    def __call__(self, _: int, delta: Delta) -> bytes:
        """Of the only choice."""
        return self.frame(delta.text)


class Passage:
    """Open until `close`: what the stream gets that does not end it is written to `outlet`, in the
    hub's callback. `arrival` is set when there is something for the reader to do: a write that was
    not taken whole, an end, or a `failure`."""

    __slots__ = ("failure", "_choice", "_completion", "_frame", "_outlet", "_arrival", "_texts")

    def __init__(
        self,
        choice: int,
        completion: Completion,
        frame: Callable[[int, Delta], bytes],
        outlet: Outlet,
        arrival: Event,
    ) -> None:
        self.failure: Exception | None = None
        self._choice = choice
        self._completion = completion
        self._frame = frame
        self._outlet = outlet
        self._arrival = arrival
        self._texts = self._find_texts()
        completion.open(self.write)

    def close(self) -> None:
        self._completion.open(None)

    def write(self, advance: Advance) -> None:
        """It must not wait, nor raise."""
        try:
            # An end token would have ended the sequence: no need to look for it.
            text = self._texts.get(advance.token_id)  # type: ignore[arg-type]  # None has no text
            if text is None:
                is_done = self._write_any(advance)
            else:
                self._completion.num_tokens += 1
                is_done = self._outlet.send(self._frame.frame(text))  # type: ignore[attr-defined]
        except Exception as error:
            self.failure = error
            is_done = False
        if not is_done:
            self._arrival.set()

    def _write_any(self, advance: Advance) -> bool:
        """False if the reader has to see to it."""
        delta = self._completion.pass_on(advance)
        self._texts = self._find_texts()
        if delta is None:
            return self._completion.finish_reason is None
        framed = self._frame(self._choice, delta)
        return not framed or self._outlet.send(framed)

    def _find_texts(self) -> Mapping[int, str]:
        return self._completion.texts if isinstance(self._frame, TextEvent) else _NO_TEXTS


def _quote(text: str) -> bytes:
    quoted = orjson.dumps(text)
    if len(text) <= _LONGEST_QUOTED and len(_quoted) < _MOST_QUOTED:
        _quoted[text] = quoted
    return quoted
