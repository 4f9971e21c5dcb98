"""Tiny models with random weights and a real architecture, as Hugging Face folders.

The vocabulary is unlike any layer's width: the graph builder finds the LM head by that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from .tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

CONTEXT = 256
VOCAB = 331
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    # Large enough that the most likely token depends on the whole prompt.
    "initializer_range": 0.15,
}


def make_phi3(
    folder: Path, sliding_window: int | None = None, longrope_from: int | None = None
) -> Path:
    """`longrope_from`: a row longer than that takes other rotary factors, as in the 128k models."""
    tokenizer = sentencepiece_tokenizer()
    factors = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = Phi3Config(
        **SHAPE,
        original_max_position_embeddings=longrope_from or CONTEXT,
        rope_scaling=factors if longrope_from else None,
        sliding_window=sliding_window,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",
    )
    # As in Phi-3's own files, one of them names every end token.
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|end|>")]
    return _save(folder, Phi3ForCausalLM, config, tokenizer, ends)


def make_llama(folder: Path) -> Path:
    tokenizer = byte_level_tokenizer()
    config = LlamaConfig(
        **SHAPE,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _save(folder, LlamaForCausalLM, config, tokenizer)


def _save(
    folder: Path,
    kind: type[PreTrainedModel],
    config: Any,
    tokenizer: Any,
    end_ids: list[int] | None = None,
) -> Path:
    torch.manual_seed(7)
    model = kind(config)
    if end_ids is not None:
        model.generation_config.eos_token_id = end_ids
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class TorchReference:
    """The same weights in torch: what every graph is compared with."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits of every position, `(len(ids), vocab)`."""
        return self._model(torch.tensor([ids])).logits[0]

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The answer without a cache: every step reads everything anew."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]
