"""Which model families the fused graph is right for, and what each layer's attention is.

tests/test_families.py compares every family here with transformers. The graph builder takes more,
and gets windows and rotary embeddings of some wrong; attention.py and rotary.py mend that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import QuantizeError

if TYPE_CHECKING:  # they take seconds, and forms.py needs the names only
    from transformers import PretrainedConfig, PreTrainedModel

# Architecture -> what people call it.
FUSED = {
    "Phi3ForCausalLM": "Phi-3, Phi-3.5, Phi-4",
    "LlamaForCausalLM": "Llama, SmolLM2",
    "SmolLM3ForCausalLM": "SmolLM3",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
    "GemmaForCausalLM": "Gemma 1",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "GraniteForCausalLM": "Granite",
    "Ernie4_5ForCausalLM": "ERNIE 4.5",
}
_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
# Model types whose layers all have the window; the others say it layer by layer (`layer_types`).
_WINDOW_EVERYWHERE = ("phi3", "mistral")


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What transformers does in one layer."""

    window: int  # tokens that a token sees, itself among them; -1: all
    has_rotary: bool = True
    is_local: bool = False  # rotates by Gemma 3's local base frequency


def check(config: PretrainedConfig) -> None:
    """Raises QuantizeError for one of these families that the fused graph would be wrong for."""
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in _ACTIVATIONS:
        raise QuantizeError(
            f"the graph builder does not know its activation {activation!r} (it knows "
            f"{', '.join(_ACTIVATIONS)})"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise QuantizeError("its attention is bidirectional: it does not generate text")
    _refuse_ambiguous_lm_head(config)


def outline(config: PretrainedConfig) -> PreTrainedModel:
    """transformers' model without weights. Raises QuantizeError if `config` makes none."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever the fields of config.json lead to
        raise QuantizeError(f"config.json makes no model in transformers: {error!r}") from error


def layer_attention(config: PretrainedConfig) -> list[LayerAttention]:
    """One for each layer, as transformers' modeling code has it."""
    num_layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or -1
    default = "sliding_attention" if config.model_type in _WINDOW_EVERYWHERE else "full_attention"
    types = getattr(config, "layer_types", None) or [default] * num_layers
    rotary = getattr(config, "no_rope_layers", None) or [1] * num_layers  # 1: it has rotary
    return [
        LayerAttention(
            window=window if kind == "sliding_attention" else -1,
            has_rotary=bool(has_rotary),
            is_local=config.model_type == "gemma3_text" and kind == "sliding_attention",
        )
        for kind, has_rotary in zip(types, rotary, strict=True)
    ]


def _refuse_ambiguous_lm_head(config: PretrainedConfig) -> None:
    """The builder takes every Linear as wide as the vocabulary for the LM head."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    widths = {
        "hidden": config.hidden_size,
        "query": config.num_attention_heads * head_dim,
        "key": num_kv_heads * head_dim,
        "query+key+value": (config.num_attention_heads + 2 * num_kv_heads) * head_dim,
        "intermediate": config.intermediate_size,
        "gate+up": 2 * config.intermediate_size,
    }
    for name, width in widths.items():
        if width == config.vocab_size:
            raise QuantizeError(
                f"the {name} width equals the vocabulary size ({width}): the graph builder would "
                "take that layer for the LM head"
            )
