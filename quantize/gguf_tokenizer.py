"""The tokenizer of a GGUF file, rebuilt from its metadata.

transformers turns every "gpt2" tokenizer of a GGUF file into one with SentencePiece-style
pre-tokenization and the wrong special tokens: text no longer round-trips, and a model that was
trained on single digits gets whole numbers. So only kinds that are known here are built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from .errors import QuantizeError

_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# `tokenizer.ggml.pre` -> how text is cut before BPE
_PRE_TOKENIZERS = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTE_LEVEL]),
}


def tokenizer_from_gguf(path: Path) -> PreTrainedTokenizerFast:
    """Raises QuantizeError for a tokenizer whose pre-tokenization is not known here, or that lacks
    what it is made of."""
    try:
        meta = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise QuantizeError(f"{path} is not a whole GGUF file: {error}") from error
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise QuantizeError(
            f"{path.name} has a tokenizer of kind {kind!r}, pre-tokenizer {pre!r}; from GGUF only "
            f"'gpt2' with {sorted(_PRE_TOKENIZERS)} is built exactly: give the HF folder instead"
        )
    try:
        return _built(meta, pre)
    except Exception as error:  # of tokenizers, too: whatever the fields lead to
        reason = f"{error} is missing" if isinstance(error, KeyError) else repr(error)
        raise QuantizeError(
            f"the tokenizer in {path.name} cannot be built: {reason}. Give the HF folder instead"
        ) from error


def _built(meta: dict[str, Any], pre: str) -> PreTrainedTokenizerFast:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    control = _of_type(meta, tokens, TokenType.CONTROL)
    backend.add_special_tokens([AddedToken(token, special=True) for token in control])
    user_defined = _of_type(meta, tokens, TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, normalized=False) for token in user_defined])
    bos = _named(meta, tokens, "bos")
    if bos is not None and meta.get("tokenizer.ggml.add_bos_token"):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=_named(meta, tokens, "eos"),
        unk_token=_named(meta, tokens, "unknown"),
        pad_token=_named(meta, tokens, "padding"),
        additional_special_tokens=control,
        chat_template=meta.get("tokenizer.chat_template"),
        model_max_length=meta[f"{meta['general.architecture']}.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _of_type(meta: dict[str, Any], tokens: list[str], wanted: TokenType) -> list[str]:
    types = meta["tokenizer.ggml.token_type"]
    return [tokens[id_] for id_, type_ in enumerate(types) if type_ == wanted]


def _named(meta: dict[str, Any], tokens: list[str], role: str) -> str | None:
    id_ = meta.get(f"tokenizer.ggml.{role}_token_id")
    return None if id_ is None else tokens[id_]
