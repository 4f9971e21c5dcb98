"""Which token ids end an answer: what the tokenizer, the folder's files and the chat template say.

They often disagree, and each of them alone lets some answers run on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .folder import CONFIG_FILE, GENAI_FILE, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SENTINEL = "answer-of-the-assistant"


def find_eos_ids(folder: Path, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Every id that ends an answer: what the tokenizer and the folder's JSON files name,
    and the token with which the chat template ends a turn. They often disagree (Phi-3: 32000,
    a list, and `<|end|>`); each of them alone lets some answers run on."""
    found = {tokenizer.eos_token_id, _turn_end(tokenizer)}
    genai = read_json(folder / GENAI_FILE) or {}
    for named in (
        read_json(folder / CONFIG_FILE),
        read_json(folder / "generation_config.json"),
        genai.get("model"),
    ):
        eos = (named or {}).get("eos_token_id")
        found.update(eos if isinstance(eos, list) else [eos])
    return frozenset(id_ for id_ in found if id_ is not None)


def _turn_end(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The first control token that the chat template writes behind an assistant's answer."""
    if tokenizer.chat_template is None:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template is a program with rules of its own about turns
        return None
    _, found, behind = str(text).rpartition(_SENTINEL)
    if not found:  # one that leaves answers out
        return None
    # Not `all_special_ids`: it lists the tokens with a role only, and a turn's end (Phi-3's
    # <|end|>) often has none.
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    ids = tokenizer.backend_tokenizer.encode(behind, add_special_tokens=False).ids
    return next((id_ for id_ in ids if id_ in added and added[id_].special), None)
