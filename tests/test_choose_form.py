"""Which form an architecture gets, and the reasons for which one gets none (FR01)."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quantize.errors import QuantizeError
from quantize.forms import FUSED, PORTABLE, choose_form


def config(model_type: str, **fields: Any) -> dict[str, Any]:
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "Nope")
    return {"model_type": model_type, "architectures": [architecture], **fields}


def refusal(found: dict[str, Any]) -> str:
    with pytest.raises(QuantizeError) as raised:
        choose_form(found)
    return str(raised.value)


@pytest.mark.parametrize("model_type", ["phi3", "llama", "qwen2", "qwen3", "mistral", "gemma"])
def test_families_of_the_builder_are_fused(model_type: str) -> None:
    assert choose_form(config(model_type)) == "fused"


@pytest.mark.parametrize("model_type", sorted(PORTABLE))
def test_listed_types_are_portable(model_type: str) -> None:
    assert choose_form(config(model_type)) == "portable"


def test_every_fused_architecture_is_one_that_transformers_knows() -> None:
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) >= FUSED.keys()


def test_portable_types_are_those_that_cannot_be_fused() -> None:
    assert not {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in PORTABLE} & FUSED.keys()


@pytest.mark.parametrize("found", [{}, {"model_type": "nope"}, {"model_type": None}])
def test_unknown_model_type_is_refused_with_what_is_supported(found: dict[str, Any]) -> None:
    message = refusal(found)
    assert repr(str(found.get("model_type"))) in message or "None" in message
    assert "Phi3ForCausalLM" in message
    assert "gpt_neox" in message


def test_unknown_model_type_names_the_versions_in_question() -> None:
    message = refusal({"model_type": "nope", "transformers_version": "9.0.0", "auto_map": {}})
    assert "not known to transformers 4." in message
    assert "written by 9.0.0" in message
    assert "never run" in message


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (config("bloom"), "it takes no position_ids"),
        (config("mpt"), "it takes no position_ids"),
        (config("falcon", alibi=True), "it takes no position_ids"),
        (config("falcon", new_decoder_architecture=True), "cache of the wrong size"),
        (config("deepseek_v3", num_hidden_layers=2), "keys and values have different shapes"),
        (config("mamba"), "cannot be exported"),
        (config("starcoder2"), "cannot be exported"),
        (config("t5"), "it is no text decoder"),
        (
            config("gpt_neox", rope_scaling={"type": "dynamic", "factor": 2.0}),
            "rope_scaling 'dynamic'",
        ),
        (config("llama") | {"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM"),
        (config("llama") | {"architectures": None}, "expected is LlamaForCausalLM"),
        (config("llama", quantization_config={"quant_method": "gptq"}), "already (gptq)"),
        (config("gpt_neox", rope_parameters={"rope_theta": 5e5}), "the form of transformers 5"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_model_that_could_not_be_served_is_refused_with_the_reason(
    found: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(found)
