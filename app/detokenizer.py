"""Text that grows by token ids: what each id stands for as bytes, and no half character.

Knows tokenizers by their tables only: it runs on the hub, which does not wait for their libraries.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .errors import UnservableModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NONE: Mapping[int, bytes] = MappingProxyType({})
_NO_TEXTS: Mapping[int, str] = MappingProxyType({})


class Detokenizer:
    """Text of a growing list of token ids, delta by delta.

    Each token stands for bytes; a delta is what is complete as UTF-8, so half a character is held
    back and the deltas always join to the text of the whole. Bytes that can never become a
    character turn into U+FFFD, and so does a character that the last token left unfinished.
    """

    def __init__(
        self,
        token_bytes: list[bytes],
        visible: Mapping[int, bytes] = _NONE,
        texts: dict[int, str] | None = None,
    ) -> None:
        """`token_bytes` by id; those of `visible` hold instead. `texts` is kept by all detokenizers
        of the same ids: what is text by itself is put there as it comes."""
        self._token_bytes = token_bytes
        self._visible = visible
        self._texts = {} if texts is None else texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_half = False  # the decoder holds half a character back

    @property
    def texts(self) -> Mapping[int, str]:
        """What `add` would return next, of those ids for which that is known and changes nothing
        here."""
        return _NO_TEXTS if self._is_half else self._texts

    def add(self, token_id: int) -> str:
        """`feed` of one."""
        was_half = self._is_half
        text = self.feed((token_id,))
        if text and not (was_half or self._is_half):
            self._texts[token_id] = text
        return text

    def feed(self, token_ids: Iterable[int], *, is_last: bool = False) -> str:
        table, visible = self._token_bytes, self._visible
        # A model's vocabulary is often padded: ids behind the tokenizer's last stand for nothing.
        known = []
        for id_ in token_ids:
            if id_ < len(table):
                known.append(visible.get(id_, table[id_]) if visible else table[id_])
        piece = b"".join(known)
        if not self._is_half and piece.isascii():  # most are
            return piece.decode()  # a fifth of the decoder's time
        text = self._decoder.decode(piece, is_last)
        self._is_half = bool(self._decoder.getstate()[0])
        return text


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """What each id stands for, as bytes; special tokens stand for none.

    Knows byte-level BPE (GPT-2: a printable character per byte) and SentencePiece style BPE (a
    U+2581 for a space, `<0xNN>` for a byte). Raises UnservableModel for others.
    """
    kinds = set(re.findall(r'"type": *"(\w+)"', json.dumps(_decoder_of(tokenizer))))
    added = tokenizer.get_added_tokens_decoder()
    if "ByteLevel" in kinds:
        to_bytes = _byte_level_bytes
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = _sentencepiece_bytes
    else:
        raise UnservableModel(f"the tokenizer's decoder {sorted(kinds)} is not known")
    table: list[bytes] = []
    # Up to the largest id: a vocabulary may have holes.
    for id_ in range(max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1):
        token = tokenizer.id_to_token(id_)
        if id_ in added:
            table.append(b"" if added[id_].special else added[id_].content.encode())
        else:
            table.append(to_bytes(token) if token is not None else b"")
    return table


def _decoder_of(tokenizer: Tokenizer) -> Any:
    return json.loads(tokenizer.to_str())["decoder"]


def _gpt2_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the other 68 for the
    characters from U+0100 on (openai/gpt-2, `encoder.py`, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_ALPHABET = _gpt2_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    if all(char in _ALPHABET for char in token):
        return bytes(_ALPHABET[char] for char in token)
    return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()
