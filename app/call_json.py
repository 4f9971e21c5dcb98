"""The JSON of a tool's call, as a model writes it: where it ends, what it calls, and how far one
that breaks off has come.

The arguments stay as they were written. Knows one object, or a list of them, and nothing of markers
or of the text around.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object, exactly as the model wrote it; of a call that is cut, its start


class JsonEnd:
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


def read_calls(text: str, arguments: str, names: Collection[str]) -> list[ToolCall]:
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


def read_cut_calls(text: str, arguments: str, names: Collection[str]) -> list[ToolCall] | None:
    """The calls of an object or a list of objects that breaks off, the last one as far as it goes;
    it is not among them before its name is told. None if they are no calls."""
    calls: list[ToolCall] = []
    try:
        at = _blank(text, 0)
        is_list = text[at] == "["
        while is_list or not calls:
            at = _blank(text, at + is_list)
            end = JsonEnd("{").find(text, at)
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
                end = JsonEnd("").find(text, at)
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
