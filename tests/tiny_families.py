"""Tiny models of every family that the fused graph is right for, one entry per kind of trap, and of
some that become portable graphs.

Each is a Hugging Face folder with random weights, two to four layers and a vocabulary unlike any
layer's width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from .tiny import SHAPE, VOCAB
from .tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

ORIGINAL = 32  # a longrope model's original context
_LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 128,
    "original_max_position_embeddings": ORIGINAL,
}


def longrope(num_factors: int) -> dict[str, Any]:
    """Factors that differ from pair to pair, and more between short and long."""
    return {
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(num_factors)],
        "long_factor": [2.0 + 1.5 * i for i in range(num_factors)],
    }


def _phi3(**fields: Any) -> Callable[[], PreTrainedModel]:
    shape = SHAPE | {"original_max_position_embeddings": SHAPE["max_position_embeddings"]} | fields
    return lambda: Phi3ForCausalLM(Phi3Config(**shape, pad_token_id=0))


def _of(
    model: type[PreTrainedModel], config: type[Any], **fields: Any
) -> Callable[[], PreTrainedModel]:
    return lambda: model(config(**(SHAPE | fields)))


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_FOUR_LAYERS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
_GEMMA = {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "phi3-4k": _phi3(num_key_value_heads=4, sliding_window=20),
    "phi3.5-128k": _phi3(**_LONGROPE, rope_scaling=longrope(8), sliding_window=500),
    "phi4-mini": _phi3(
        **_LONGROPE,
        num_attention_heads=1,
        num_key_value_heads=1,
        rope_scaling=longrope(24),
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
        sliding_window=500,
    ),
    "llama": _of(LlamaForCausalLM, LlamaConfig),
    "llama-biases": _of(LlamaForCausalLM, LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama3-tied": _of(
        LlamaForCausalLM, LlamaConfig, rope_scaling=_LLAMA3, tie_word_embeddings=True
    ),
    "llama-linear": _of(
        LlamaForCausalLM, LlamaConfig, rope_scaling={"rope_type": "linear", "factor": 4.0}
    ),
    "smollm3": _of(SmolLM3ForCausalLM, SmolLM3Config, num_hidden_layers=4, pad_token_id=0),
    "smollm3-window": _of(
        SmolLM3ForCausalLM,
        SmolLM3Config,
        num_hidden_layers=4,
        pad_token_id=0,
        use_sliding_window=True,
        sliding_window=12,
    ),
    "mistral": _of(MistralForCausalLM, MistralConfig, sliding_window=None),
    "mistral-window": _of(
        MistralForCausalLM, MistralConfig, sliding_window=12, head_dim=32, rope_theta=5e5
    ),
    "qwen2": _of(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True),
    "qwen2-window": _of(
        Qwen2ForCausalLM,
        Qwen2Config,
        use_sliding_window=True,
        sliding_window=12,
        max_window_layers=1,
    ),
    "qwen2-yarn": _of(
        Qwen2ForCausalLM,
        Qwen2Config,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "qwen3": _of(Qwen3ForCausalLM, Qwen3Config, head_dim=32, tie_word_embeddings=True),
    "gemma": _of(GemmaForCausalLM, GemmaConfig, **_GEMMA, num_key_value_heads=1),
    "gemma2": _of(
        Gemma2ForCausalLM,
        Gemma2Config,
        **_GEMMA,
        sliding_window=12,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=1.0,
    ),
    "gemma3": _of(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        **_GEMMA,
        num_hidden_layers=4,
        layer_types=_FOUR_LAYERS,
        sliding_window=12,
        query_pre_attn_scalar=24,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "granite": _of(
        GraniteForCausalLM,
        GraniteConfig,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.1,
    ),
    "ernie4.5": _of(Ernie4_5ForCausalLM, Ernie4_5Config, head_dim=32, use_bias=True),
}

_PORTABLE_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
PORTABLE_SHAPES: dict[str, dict[str, Any]] = {
    "gpt_neox": {**_PORTABLE_SHAPE, "intermediate_size": 160, "initializer_range": 0.15},
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 262,  # the tokenizer's
        "eos_token_id": 262,
        "initializer_range": 0.15,
    },
    "opt": {**_PORTABLE_SHAPE, "ffn_dim": 160, "word_embed_proj_dim": 64, "init_std": 0.15},
    "stablelm": {**_PORTABLE_SHAPE, "num_key_value_heads": 2, "initializer_range": 0.15},
}


def _portable(model_type: str) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **PORTABLE_SHAPES[model_type])
    return AutoModelForCausalLM.from_config(config)


def make_family(name: str, folder: Path) -> Path:
    torch.manual_seed(7)
    model = FAMILIES[name]() if name in FAMILIES else _portable(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # A fresh model has biases of zero and norms of one: they could be lost unseen.
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    is_phi3 = name.startswith("phi")
    (sentencepiece_tokenizer() if is_phi3 else byte_level_tokenizer()).save_pretrained(folder)
    assert model.config.vocab_size == VOCAB
    return folder
