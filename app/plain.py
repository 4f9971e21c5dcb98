"""Encoding of what users write: control tokens are plain text in it, wherever it stands.

Works on a copy of the tokenizer in which everything that steers a model is marked as special, and
special tokens are not looked for.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import AddedToken, Tokenizer

from .control import is_control


class PlainEncoder:
    """Encodes text in which control tokens are plain text."""

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        """Takes what tokenizer.json holds."""
        added = [
            {**token, "special": is_control(token["content"], token["special"])}
            for token in tokenizer["added_tokens"]
        ]
        fields = {**tokenizer, "added_tokens": added}
        control = [token for token in added if token["special"]]
        self._first = _without_control(fields)
        # A text inside another one: what a tokenizer puts in front of the whole is not repeated.
        kinds = {token["normalized"] for token in control}
        self._behind = {normalized: self._inner(fields, normalized) for normalized in kinds}
        # Some models' vocabularies make a control token out of its characters.
        forged = [t["content"] for t in control if t["id"] in self._ids(t["content"])]
        ways = [
            f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in forged if text[1:]
        ]
        self._cut = re.compile("|".join(ways)) if ways else None

    def encode(self, text: str) -> list[int]:
        """With what the tokenizer puts around a text (BOS)."""
        first, *others = self._pieces(text)
        ids = self._ids(first, add_special_tokens=True)
        return ids + [id_ for piece in others for id_ in self._ids(piece)]

    def encode_part(self, text: str, behind: AddedToken | None) -> list[int]:
        """With nothing around it; it stands behind that control token, or in front."""
        if not text:
            return []
        encoder = self._first if behind is None else self._behind[behind.normalized]
        ids: list[int] = []
        for piece in self._pieces(text):
            [encoding] = encoder.encode_batch([piece], add_special_tokens=False)
            ids += encoding.ids
        return ids

    def _ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        # As a batch of one: for a batch the library releases the GIL.
        [encoding] = self._first.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _pieces(self, text: str) -> list[str]:
        return self._cut.split(text) if self._cut else [text]

    def _inner(self, fields: dict[str, Any], behind_normalized: bool) -> Tokenizer:
        """The encoder for what stands behind a control token; most often the same."""
        inner = _changed_parts(fields, behind_normalized)
        return self._first if inner == fields else _without_control(inner)


def control_finder(fields: dict[str, Any]) -> Tokenizer:
    """Finds the added tokens of a tokenizer.json where it does, but what lies between is one piece:
    tokenizing that would take long and be of no use."""
    vocabulary = {token["content"]: token["id"] for token in fields["added_tokens"]}
    other = "".join(vocabulary) + "?"  # longer than each of them
    vocabulary[other] = max(vocabulary.values(), default=0) + 1
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": other}
    unused = dict.fromkeys(("pre_tokenizer", "post_processor", "decoder"))
    return Tokenizer.from_str(json.dumps({**fields, **unused, "model": model}))


def _changed_parts(fields: dict[str, Any], behind_normalized: bool) -> dict[str, Any]:
    """A tokenizer that puts nothing in front of what does not begin the text.

    `Metaspace` does so once per text if its scheme is "first"; the normalizer `Prepend` in front of
    each part between tokens that are found before it runs.
    """

    def walk(part: Any) -> Any:
        if isinstance(part, list):
            return [walk(item) for item in part]
        if not isinstance(part, dict):
            return part
        if part.get("type") == "Prepend" and behind_normalized:
            return {"type": "Prepend", "prepend": ""}
        part = {key: walk(value) for key, value in part.items()}
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
        return part

    names = ("normalizer", "pre_tokenizer")
    return {**fields, **{name: walk(fields[name]) for name in names}}


def _without_control(fields: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    tokenizer.encode_special_tokens = True
    return tokenizer
