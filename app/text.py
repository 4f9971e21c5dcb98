"""Between text and token ids: the codec of one model folder.

Knows the tokenizer, nothing of requests, HTTP or the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from .control import ControlTokens, is_control
from .detokenizer import Detokenizer, token_bytes
from .ends import find_eos_ids
from .errors import UnservableModel
from .plain import PlainEncoder, control_finder


class TextCodec:
    """The tokenizer of one model folder."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_ids: frozenset[int]) -> None:
        self.eos_ids = eos_ids
        self._tokenizer = tokenizer
        self._control_parser: Tokenizer = tokenizer.backend_tokenizer
        # A tokenizer.json may ask for both; a prompt is refused when too long, never cut.
        self._control_parser.no_truncation()
        self._control_parser.no_padding()
        added = self._control_parser.get_added_tokens_decoder()
        self._added = {i: t for i, t in added.items() if is_control(t.content, t.special)}
        self.control = ControlTokens({i: token.content for i, token in self._added.items()})
        fields = json.loads(self._control_parser.to_str())
        self._control_finder = control_finder(fields)
        self._plain = PlainEncoder(fields)
        self._token_bytes = token_bytes(self._control_parser)
        self._texts: dict[int, str] = {}  # of those that are text by themselves, as they come
        self._names: dict[int, bytes] = {
            i: t.content.encode() for i, t in added.items() if t.special
        }
        self._added_blank = self._find_added_blanks()

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Raises UnservableModel without a usable fast tokenizer."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise UnservableModel(f"{folder} has no usable tokenizer: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UnservableModel(f"{folder} has no fast tokenizer (tokenizer.json)")
        eos_ids = find_eos_ids(folder, tokenizer)
        if not eos_ids:
            raise UnservableModel(f"{folder} names no end-of-sequence token: no answer would end")
        return cls(tokenizer, eos_ids)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._control_parser

    @property
    def vocab_size(self) -> int:
        return len(self._token_bytes)

    def encode(
        self, text: str, *, parse_special: bool = False, prefix: bool | None = None
    ) -> list[int]:
        """Token ids of `text`.

        Control tokens written in the text are plain text, and the tokenizer's own prefix (BOS) is
        added; with `parse_special` they are control tokens and nothing is added. `prefix` decides
        otherwise.
        """
        prefix = not parse_special if prefix is None else prefix
        if parse_special:
            [encoding] = self._control_parser.encode_batch([text], add_special_tokens=prefix)
            return list(encoding.ids)
        return self._plain.encode(text) if prefix else self._plain.encode_part(text, None)

    def encode_rendered(self, text: str, restore: Callable[[str], str]) -> list[int]:
        """Token ids of a rendered conversation: control tokens where they stand in `text`, and
        what lies between as plain text, after `restore`, which may bring further ones to light.

        Where it brings none, these are the ids of `encode(text, parse_special=True)`.
        """
        ids: list[int] = []
        last: AddedToken | None = None
        at = 0
        for id_, start, end in self._controls(text):
            ids += self._plain.encode_part(restore(text[at:start]), last)
            ids.append(id_)
            last, at = self._added[id_], end
        return ids + self._plain.encode_part(restore(text[at:]), last)

    def control_ids(self, text: str) -> list[int]:
        """The control tokens that stand in `text`, in order."""
        return [id_ for id_, _, _ in self._controls(text)]

    def _controls(self, text: str) -> list[tuple[int, int, int]]:
        """Id, start and end of each; the blanks that a token takes with it belong to it."""
        [encoding] = self._control_finder.encode_batch([text], add_special_tokens=False)
        return [
            (id_, start, end)
            for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            # A normalizer may make one out of other characters (NFKC): that is no control token.
            if id_ in self._added and text[start:end].strip() == self._added[id_].content.strip()
        ]

    @property
    def template(self) -> str | None:
        """The chat template's source, all of it if there are several."""
        source = self._tokenizer.chat_template
        return "\n".join(source.values()) if isinstance(source, dict) else source

    def apply_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> str:
        """The conversation with the opening of the answer, by the sandboxed template.

        Raises what the template raises.
        """
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        )

    def control_id(self, content: str) -> int | None:
        """The id of a control token that is special (it is no text for the detokenizer)."""
        found = (i for i, t in self._added.items() if t.content == content and t.special)
        return next(found, None)

    def spell(self, token_id: int) -> bytes:
        """What a token stands for as a person reads it: control tokens by their names."""
        known = self._token_bytes[token_id] if token_id < self.vocab_size else b""
        return self._names.get(token_id, known)

    def decode(self, token_ids: list[int]) -> str:
        """The text that `encode` makes these ids of, control tokens written out.

        Not the text that a model would add with them: SentencePiece's tokenizers put a blank in
        front of a text, which is none of it.
        """
        at_start, behind_control = self._added_blank
        spelled: list[bytes] = []
        is_added = at_start
        for id_ in token_ids:
            piece = self.spell(id_)
            if id_ in self._added:
                is_added = behind_control
            elif piece:
                if is_added:
                    piece = piece.removeprefix(b" ")
                is_added = False
            spelled.append(piece)
        return b"".join(spelled).decode("utf-8", "replace")

    def _find_added_blanks(self) -> tuple[bool, bool]:
        """Is a blank put in front of a text, and of what follows a control token?"""

        def is_blank(text: str) -> bool:
            ids = self._control_parser.encode(text, add_special_tokens=False).ids
            first = next((id_ for id_ in ids if id_ not in self._added), None)
            return first is not None and self._token_bytes[first].startswith(b" ")

        control = next((token.content for token in self._added.values()), "")
        return is_blank("a"), bool(control) and is_blank(f"{control}a")

    def detokenizer(self, visible_ids: frozenset[int] = frozenset()) -> Detokenizer:
        """For one answer; control tokens are no text of it, but for `visible_ids`."""
        if visible_ids:
            return Detokenizer(self._token_bytes, {id_: self.spell(id_) for id_ in visible_ids})
        return Detokenizer(self._token_bytes, texts=self._texts)
