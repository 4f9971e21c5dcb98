"""Calls in an answer's text, as it grows: what can be shown goes out, a complete call as one piece.

Only what may still become a call is held back, and what does not is text after all: nothing is lost
and the result does not depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Collection

from .call_json import JsonEnd, ToolCall, read_calls, read_cut_calls
from .stops import overlap
from .tools import ToolFormat


class ToolParser:
    """Feed it an answer's text in order; it gives text and calls in the order of the answer.

    A call is one if its JSON is whole, its name one of `names`, and its end marker there. Blanks
    around calls are left out. After `max_calls` calls, all is text. `is_forced`: the answer has to
    be calls, so that also the start of one's marker is no text.
    """

    def __init__(
        self,
        format_: ToolFormat,
        names: Collection[str],
        max_calls: int | None = None,
        *,
        is_forced: bool = False,
    ) -> None:
        self._format = format_
        self._names = names
        self._max_calls = max_calls
        self._is_forced = is_forced
        self._is_cut = False
        self._num_calls = 0
        self._buffer = ""
        self._body = -1  # where the JSON may begin, within a call
        self._end = JsonEnd("")
        self._is_text_only = False
        self._follows_call = False

    def feed(self, text: str) -> list[str | ToolCall]:
        self._buffer += text
        return self._take(is_last=False)

    def flush(self, *, is_cut: bool = False) -> list[str | ToolCall]:
        """The answer has ended: what was held back. `is_cut`: not by the model; a call that has
        begun is one then as far as it goes, and left out where its name is not told yet."""
        self._is_cut = is_cut
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> list[str | ToolCall]:
        out: list[str | ToolCall] = []
        while self._step(out, is_last):
            pass
        return out

    def _step(self, out: list[str | ToolCall], is_last: bool) -> bool:
        """Moves on by a text or a call; False when there is no more to do for now."""
        if self._body >= 0:
            return self._call(out, is_last)
        if self._is_text_only or self._num_calls == self._max_calls:
            is_held = self._follows_call and not self._buffer.strip()
            cut, begins = 0 if is_held else len(self._buffer), False
        elif self._format.begin:
            cut, begins = self._marker()
        else:
            cut, begins = self._brace()
        if not begins and is_last:
            is_blank = self._follows_call and not self._buffer.strip()
            is_dropped = is_blank or (self._is_cut and self._is_forced)
            self._give(out, cut if is_dropped else len(self._buffer))
            self._buffer = ""
        else:
            self._give(out, cut)
        return begins

    def _marker(self) -> tuple[int, bool]:
        """Where a call, or what may become one, begins with the blanks before it."""
        begin, buffer = self._format.begin, self._buffer
        at = buffer.find(begin)
        cut = at if at >= 0 else len(buffer) - overlap(buffer, begin)
        blanks_from = len(buffer[:cut].rstrip())
        if at >= 0:
            self._enter(at + len(begin) - blanks_from)
        return blanks_from, at >= 0

    def _brace(self) -> tuple[int, bool]:
        begun = self._buffer.lstrip()
        if begun.startswith("{"):
            self._enter(len(self._buffer) - len(begun))
        elif begun:
            self._is_text_only = True
            return len(self._buffer), False
        return 0, begun.startswith("{")

    def _enter(self, body: int) -> None:
        self._body = body
        self._end = JsonEnd("{[" if self._format.is_list else "{")

    def _call(self, out: list[str | ToolCall], is_last: bool) -> bool:
        end = self._end.find(self._buffer, self._body)
        if end is None:
            if is_last and self._is_cut and not self._end.is_hopeless:
                return self._cut(out)
            return self._reject(out) if self._end.is_hopeless or is_last else False
        calls = read_calls(self._buffer[self._body : end], self._format.arguments, self._names)
        room = None if self._max_calls is None else self._max_calls - self._num_calls
        if not calls or (room is not None and len(calls) > room):
            return self._reject(out)
        marker = self._format.end
        behind = self._buffer[end:].lstrip() if marker else ""
        if self._is_cut and marker.startswith(behind):
            behind = marker
        if not behind.startswith(marker):
            return self._reject(out) if is_last or not marker.startswith(behind) else False
        self._buffer = self._buffer[end:] if not marker else behind[len(marker) :]
        out += calls
        self._num_calls += len(calls)
        self._follows_call = True
        self._body = -1
        self._is_text_only = not self._format.begin
        return True

    def _cut(self, out: list[str | ToolCall]) -> bool:
        """The answer ends within a call, as far as can be told."""
        calls = read_cut_calls(self._buffer[self._body :], self._format.arguments, self._names)
        room = None if self._max_calls is None else self._max_calls - self._num_calls
        is_marked = bool(self._format.begin) or self._is_forced
        if calls is None or not (calls or is_marked) or (room is not None and len(calls) > room):
            return self._reject(out)
        out += calls
        self._num_calls += len(calls)
        self._buffer, self._body = "", -1
        return False

    def _reject(self, out: list[str | ToolCall]) -> bool:
        """No call: the marker is text, and what follows it may hold another one."""
        self._give(out, self._body)
        self._body = -1
        self._is_text_only = not self._format.begin
        return True

    def _give(self, out: list[str | ToolCall], cut: int) -> None:
        if cut:
            out.append(self._buffer[:cut])
            self._buffer = self._buffer[cut:]
            self._follows_call = False
