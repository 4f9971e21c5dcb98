"""Control tokens: which they are, and how they are kept out of what users write.

While a chat template runs, stand-ins (private-use characters) take the place of the characters of
user strings with which a control token could begin; the control tokens found then are the
template's own. Knows nothing of tokenizers' encoding, templates or requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from .errors import InvalidRequest

_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|<\|.+\|>")
_PLANE_15 = re.compile("[\U000f0000-\U000ffffd]")
_NUM_PRIVATE = 0xFFFE

Change = Callable[[str], str]


def is_control(content: str, special: bool) -> bool:
    """Whether an added token steers the model.

    Many that do are not marked as special (Qwen's `<think>` and `<tool_call>`). Runs of blanks are
    added tokens of many tokenizers and only text.
    """
    return bool(content.strip()) and (special or _TAG.fullmatch(content) is not None)


class ControlTokens:
    """The control tokens of one tokenizer, by id; `first` holds their first characters."""

    def __init__(self, contents: dict[int, str]) -> None:
        self.contents = contents
        texts = set(contents.values())
        self.first = "".join(sorted({text[0] for text in texts}))
        self._halves = {text[:n] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        self._whole = _starts_of(texts)

    def stand_ins(self, texts: Iterable[str]) -> StandIns:
        """Ones that none of `texts` has. Raises InvalidRequest if these use up all."""
        taken = set(_PLANE_15.findall("".join(texts)))
        free = (char for i in range(_NUM_PRIVATE) if (char := chr(0xF0000 + i)) not in taken)
        if _NUM_PRIVATE - len(taken) < len(self.first):
            raise InvalidRequest("messages: they use up the private-use characters of plane 15")
        return StandIns(self, dict(zip(self.first, free, strict=False)))

    def starts(self, text: str) -> set[int]:
        """Places where a control token begins in `text`, or would if it went on behind its end."""
        places = {match.start() for match in self._whole.finditer(text)} if self._whole else set()
        # Templates trim, so blanks at the end do not keep halves apart.
        for end in {len(text), len(text.rstrip())}:
            for at in range(max(0, end - self._longest + 1), end):
                if text[at:end] in self._halves:
                    places.add(at)
        return places


class StandIns:
    """One choice of stand-ins: for the first characters of control tokens, and back."""

    def __init__(self, control: ControlTokens, chars: dict[str, str]) -> None:
        self._control = control
        self._chars = chars
        # A letter or digit alone is too common to be replaced wherever it stands.
        self._signs = {char: stand_in for char, stand_in in chars.items() if not char.isalnum()}

    def full(self, text: str) -> str:
        """Every sign with which a control token begins is replaced."""
        text = self.minimal(text)
        for char, stand_in in self._signs.items():
            text = text.replace(char, stand_in)
        return text

    def minimal(self, text: str) -> str:
        """Only control tokens, and what would be one together with what follows, are broken."""
        places = self._control.starts(text)
        if not places:
            return text
        chars = list(text)
        for place in places:
            chars[place] = self._chars[chars[place]]
        return "".join(chars)

    def restore(self, text: str) -> str:
        for char, stand_in in self._chars.items():
            text = text.replace(stand_in, char)
        return text


def _starts_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the first character of each of `texts`, however they overlap."""
    rests: dict[str, list[str]] = {}
    for text in sorted(texts):
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    ways = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
    return re.compile("|".join(ways)) if ways else None


def changed(value: Any, change: Change) -> Any:
    """A copy of JSON-like `value` with `change` made to every string, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {changed(key, change): changed(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [changed(item, change) for item in value]
    return value


def strings(value: Any) -> list[str]:
    """Every string in JSON-like `value`, keys included."""
    found: list[str] = []
    changed(value, lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
    return found
