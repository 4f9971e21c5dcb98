"""Tokenizers of the two families that small decoder models use, with vocabularies of a few hundred
tokens, made here: nothing is downloaded."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PHI3_SPECIALS = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|user|>", "<|end|>"]
# As published with Phi-3 Mini: the present one, and the first one, which knew no system role.
PHI3_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + "
    "message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + "
    "message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI3_FIRST_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') %}"
    "{{'<|user|>' + '\n' + message['content'] + '<|end|>' + '\n' + '<|assistant|>' + '\n'}}"
    "{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|end|>' + '\n'}}"
    "{% endif %}{% endfor %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# Phi-3's own, from 32000 on: <|endoftext|> 32000, <|assistant|> 32001, <|end|> 32007.
_PHI3_NUMBERED = [
    *("<|endoftext|>", "<|assistant|>", *(f"<|placeholder{i}|>" for i in range(1, 5))),
    *("<|system|>", "<|end|>", "<|placeholder5|>", "<|placeholder6|>", "<|user|>"),
]


def phi3_numbered_tokenizer() -> PreTrainedTokenizerFast:
    """With as many pieces as Phi-3's, and its control tokens behind them."""
    return sentencepiece_tokenizer(32000, _PHI3_NUMBERED)


def sentencepiece_tokenizer(
    num_pieces: int = 0, specials: list[str] = PHI3_SPECIALS
) -> PreTrainedTokenizerFast:
    """Llama and Phi-3 style: U+2581 for a space, byte fallback. Filled up to `num_pieces`."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "th", "he", "\u2581the", "\u2581a"]
    merges = [("t", "h"), ("h", "e"), ("\u2581", "the"), ("th", "e"), ("\u2581", "a")]
    letters.append("the")
    known = [*pieces, *letters]
    known += [f"filler-{i}" for i in range(num_pieces - len(known))]
    vocabulary = {piece: id_ for id_, piece in enumerate(known)}
    backend = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ["<unk>", "<s>", "</s>"]])
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",  # <|end|> and the like have no role, as in Phi-3's own files
        chat_template=PHI3_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2, SmolLM and Qwen style: a printable character for every byte, nothing in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a")]
    pieces = [*alphabet, *(left + right for left, right in merges)]
    vocabulary = {piece: id_ for id_, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=specials,
        chat_template=CHATML_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
