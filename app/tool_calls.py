"""Calls in an answer's text, as it grows: what can be shown goes out, a complete call as one piece.

Only what may still become a call is held back, and what does not is text after all: nothing is lost
and the result does not depend on how the text is cut.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from .stops import overlap
from .tools import ToolFormat


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object, exactly as the model wrote it; of a call that is cut, its start


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
        self._end = _JsonEnd("")
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
        self._end = _JsonEnd("{[" if self._format.is_list else "{")

    def _call(self, out: list[str | ToolCall], is_last: bool) -> bool:
        end = self._end.find(self._buffer, self._body)
        if end is None:
            if is_last and self._is_cut and not self._end.is_hopeless:
                return self._cut(out)
            return self._reject(out) if self._end.is_hopeless or is_last else False
        calls = _read(self._buffer[self._body : end], self._format.arguments, self._names)
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
        calls = _read_cut(self._buffer[self._body :], self._format.arguments, self._names)
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


class _JsonEnd:
    """Finds where an object or list ends, going on where it has stopped."""

    def __init__(self, openings: str) -> None:
        self._openings = openings
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._found: int | None = None
        self.is_hopeless = False  # what is there is neither

    def find(self, text: str, begin: int) -> int | None:
        """The place behind it in `text`, which only grows."""
        self._at = max(self._at, begin)
        while self._found is None and self._at < len(text) and not self.is_hopeless:
            char = text[self._at]
            if self._in_string and char == "\\":
                if self._at + 1 == len(text):
                    return None
                self._at += 1
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += (char in "{[") - (char in "}]")
            self._at += 1
            if self._depth <= 0:
                if self._depth == 0 and char in "}]":
                    self._found = self._at
                else:
                    self.is_hopeless = not char.isspace()
            elif self._depth == 1 and self._openings and not self._in_string:
                self.is_hopeless = char in "{[" and char not in self._openings
                self._openings = ""
        return self._found


def _read(text: str, arguments: str, names: Collection[str]) -> list[ToolCall]:
    """The calls of an object or a list of objects; none if one of them is no call."""
    try:
        at = _blank(text, 0)
        if text[at] == "{":
            return [_read_one(text, at, arguments, names)[0]]
        calls: list[ToolCall] = []
        while text[at] in "[,":
            call, at = _read_one(text, _blank(text, at + 1), arguments, names)
            calls.append(call)
            at = _blank(text, at)
        return calls if text[at:] == "]" else []
    except (ValueError, IndexError, RecursionError):
        return []


def _read_one(text: str, at: int, arguments: str, names: Collection[str]) -> tuple[ToolCall, int]:
    """A call and the place behind it. Raises ValueError or IndexError."""
    if text[at] != "{":
        raise ValueError("no object")
    members: dict[str, tuple[Any, str]] = {}
    at = _blank(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        at = _blank(text, at)
        if text[at] != ":" or not isinstance(key, str) or key in members:
            raise ValueError("no key")
        at = _blank(text, at + 1)
        value, end = _DECODER.raw_decode(text, at)
        members[key] = value, text[at:end]
        at = _blank(text, end)
        if text[at] == ",":
            at = _blank(text, at + 1)
            if text[at] == "}":
                raise ValueError("no member behind a comma")
        elif text[at] != "}":
            raise ValueError("no comma")
    name, _ = members.pop("name", (None, ""))
    given, written = members.pop(arguments, ({}, "{}"))
    members.pop("id", None)  # Mistral's models may number their calls
    if name not in names or not isinstance(given, dict) or members:
        raise ValueError("no call")
    return ToolCall(name, written), at + 1


def _read_cut(text: str, arguments: str, names: Collection[str]) -> list[ToolCall] | None:
    """The calls of an object or a list of objects that breaks off, the last one as far as it goes;
    it is not among them before its name is told. None if they are no calls."""
    calls: list[ToolCall] = []
    try:
        at = _blank(text, 0)
        is_list = text[at] == "["
        while is_list or not calls:
            at = _blank(text, at + is_list)
            end = _JsonEnd("{").find(text, at)
            if end is None:
                return calls + _read_start(text, at, arguments, names)
            call, at = _read_one(text, at, arguments, names)
            calls.append(call)
            at = _blank(text, at)
            if text[at] != ",":
                return None
    except IndexError:  # it breaks off between calls
        return calls
    except (ValueError, RecursionError):
        return None
    return calls


def _read_start(text: str, at: int, arguments: str, names: Collection[str]) -> list[ToolCall]:
    """A call that breaks off, if its name is told. Raises ValueError for what becomes none."""
    name, given = "", ""
    try:
        if text[at] != "{":
            raise ValueError("no object")
        while True:
            key, at = _read_key(text, _blank(text, at + 1), ("name", arguments, "id"))
            if key == arguments:
                if text[at] != "{":
                    raise ValueError("no object")
                end = _JsonEnd("").find(text, at)
                given = text[at:end]
                if end is None:
                    break
                _DECODER.raw_decode(given)
                at = end
            else:
                value, at = _read_string(text, at, names if key == "name" else None)
                name = value if key == "name" else name
            at = _blank(text, at)
            if text[at] != ",":
                raise ValueError("no comma")
    except IndexError:
        pass
    return [ToolCall(name, given)] if name else []


def _read_key(text: str, at: int, keys: Collection[str]) -> tuple[str, int]:
    """One of `keys` and the place of its value. Raises IndexError if the text ends before that."""
    key, at = _read_string(text, at, keys)
    at = _blank(text, at)
    if text[at] != ":":
        raise ValueError("no key")
    return key, _blank(text, at + 1)


def _read_string(text: str, at: int, known: Collection[str] | None) -> tuple[str, int]:
    """A string, one of `known`, and the place behind it. Raises IndexError if the text ends within
    one that still may be."""
    if text[at] != '"':
        raise ValueError("no string")
    end = text.find('"', at + 1)
    written = text[at + 1 : end if end >= 0 else None]
    if known is not None and not any(
        each == written if end >= 0 else each.startswith(written) for each in known
    ):
        raise ValueError("unknown")
    if end < 0:
        raise IndexError
    return written, end + 1


def _blank(text: str, at: int) -> int:
    """The first place from `at` on that is not blank."""
    while text[at] in " \t\r\n":
        at += 1
    return at


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
