"""Tiny tokenizers with chat templates of every manner, by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.chat import ChatTemplate
from app.text import TextCodec

from . import tiny_templates as templates
from .tiny_tokenizers import (
    PHI3_FIRST_TEMPLATE,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)

DEFAULT = Path(__file__).parents[1] / "models" / "default"


def _with(
    tokenizer: PreTrainedTokenizerFast,
    template: str | None,
    specials: list[str] | None = None,
    tags: list[str] | None = None,
    **flags: bool,
) -> PreTrainedTokenizerFast:
    """`specials` are control tokens, `tags` too, without being marked as such (Qwen)."""
    added = [AddedToken(text, special=True, **flags) for text in specials or []]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags or []])
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _metaspace() -> PreTrainedTokenizerFast:
    """Llama 2 as transformers 4.40 and later convert it: a space in front of the text alone."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first", split=False
    )
    return tokenizer


_HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_INST = ["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"]
_MISTRAL = [*_INST, "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
_PHI4 = ["<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"]
_QWEN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]
_PHI3 = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def _make(name: str) -> PreTrainedTokenizerFast:
    match name:
        case "phi3":  # its turn tokens swallow the blanks behind them
            return _with(sentencepiece_tokenizer(specials=[]), None, _PHI3, rstrip=True)
        case "phi3-first":
            return _with(sentencepiece_tokenizer(), PHI3_FIRST_TEMPLATE)
        case "phi4":
            return _with(sentencepiece_tokenizer(), templates.PHI4, _PHI4)
        case "mistral":
            return _with(sentencepiece_tokenizer(specials=[]), templates.MISTRAL, _MISTRAL)
        case "gemma":
            turns = ["<start_of_turn>", "<end_of_turn>"]
            return _with(_metaspace(), templates.GEMMA, turns)
        case "chatml":
            return byte_level_tokenizer()
        case "llama3":
            return _with(byte_level_tokenizer(), templates.LLAMA3, _HEADERS)
        case "llama31":
            return _with(byte_level_tokenizer(), templates.LLAMA31, _HEADERS)
        case "qwen":
            return _with(byte_level_tokenizer(), templates.QWEN, None, [*_QWEN, "</tool_response>"])
        case "unknown":
            return _with(byte_level_tokenizer(), templates.UNKNOWN_FORMAT)
        case "default":
            return AutoTokenizer.from_pretrained(DEFAULT)
    raise KeyError(name)


NAMES = [
    *("phi3", "phi3-first", "phi4", "mistral", "gemma", "chatml", "llama3", "llama31", "qwen"),
    "unknown",
]


class Chat:
    """A tokenizer, the codec on it, and its chat template. To be read only."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.codec = TextCodec(tokenizer, frozenset())
        self.template = ChatTemplate(self.codec)


@cache
def chat(name: str) -> Chat:
    return Chat(_make(name))
