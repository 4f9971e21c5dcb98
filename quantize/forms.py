"""Which form of graph an architecture gets, decided from config.json before any other work.

`fused` is the form of onnxruntime-genai's builder, for the families of families.py; `portable` that
of optimum's own export. What neither can do right is refused here, with what is supported.
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Mapping
from typing import Any, Literal

from .errors import QuantizeError
from .families import FUSED

Form = Literal["fused", "portable"]
Dtype = Literal["fp32", "fp16"]  # of a graph that is not quantized

TASK = "text-generation-with-past"
# Model types whose own export was compared with torch, left-padded rows and a cache included.
PORTABLE = frozenset(
    {
        *{"arcee", "codegen", "cohere", "falcon", "glm", "gpt2", "gpt_bigcode", "gpt_neo"},
        *{"gpt_neox", "gptj", "helium", "olmo", "olmo2", "opt", "phi", "qwen3_moe", "stablelm"},
    }
)


def choose_form(config: Mapping[str, Any]) -> Form:
    """`config` is config.json. Raises QuantizeError, saying what is supported, for the rest."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING_NAMES:
        raise QuantizeError(_unknown(config))
    _refuse_quantized(config)
    _refuse_later_config(config)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    named = config.get("architectures") or ["none"]
    if named[0] != architecture:
        expected = f"expected is {architecture}" if architecture else "it is no text decoder"
        raise QuantizeError(
            f"config.json names the architecture {named[0]} for the model type {model_type!r}; "
            f"{expected}. {_supported()}"
        )
    if architecture in FUSED:
        return "fused"
    _check_portable(model_type, config)
    return "portable"


def portable_config(model_type: str, config: Any) -> Any:
    """optimum's description of the export: inputs, outputs, dummy values, patches."""
    constructor = _tasks(model_type)[TASK]
    return constructor(config, use_past=True, use_past_in_inputs=True)


def _check_portable(model_type: str, values: Mapping[str, Any]) -> None:
    from transformers import AutoConfig

    if TASK not in _tasks(model_type):
        raise QuantizeError(f"the model type {model_type!r} cannot be exported. {_supported()}")
    try:
        export = portable_config(model_type, AutoConfig.for_model(**copy.deepcopy(dict(values))))
        inputs = export.inputs
        past = export.generate_dummy_inputs(framework="pt")["past_key_values"]
    except Exception as error:  # whatever the fields of the file lead to
        raise QuantizeError(f"config.json cannot be used: {error}") from error
    if not export.is_transformers_support_available:
        raise QuantizeError(
            f"to export the model type {model_type!r}, transformers "
            f"{export.MIN_TRANSFORMERS_VERSION} or newer is needed"
        )
    if problem := _cache_problem(inputs, past) or known_problem(model_type, values):
        raise QuantizeError(
            f"the model type {model_type!r} would come out as a graph that cannot be served: "
            f"{problem}. {_supported()}"
        )
    if model_type not in PORTABLE:
        raise QuantizeError(
            f"the export of model type {model_type!r} has not been tested. {_supported()}"
        )


def _cache_problem(inputs: Mapping[str, Mapping[int, str]], past: Any) -> str | None:
    """What the server could not take: it fills left-padded rows, and says each token's position."""
    caches = {name: axes for name, axes in inputs.items() if name.startswith("past_key_values.")}
    if not caches:
        return "it has no KV cache"
    shapes = {tuple(getattr(tensor, "shape", ())) for layer in past for tensor in layer}
    if any(set(axes) != {0, 2} for axes in caches.values()) or {len(s) for s in shapes} != {4}:
        return "its cache is not laid out as (rows, heads, tokens, head_dim)"
    if len(shapes) != 1:
        return "its keys and values have different shapes"
    if "position_ids" not in inputs:
        return "it takes no position_ids, so the positions of its tokens cannot be told"
    return None


def known_problem(model_type: str, config: Mapping[str, Any]) -> str | None:
    """What the portable form of a model would get wrong, whoever exports it."""
    if model_type == "falcon" and config.get("new_decoder_architecture"):
        return "optimum exports its grouped heads with a cache of the wrong size"
    if (kind := rope_kind(config)) in ("dynamic", "longrope"):
        return f"tracing freezes its rope_scaling {kind!r}, which changes with the length"
    return None


def rope_kind(config: Mapping[str, Any]) -> Any:
    scaling = config.get("rope_scaling")
    return scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None


def _unknown(config: Mapping[str, Any]) -> str:
    version = importlib.metadata.version("transformers")
    text = f"model_type {config.get('model_type')!r} is not known to transformers {version}"
    if "auto_map" in config:
        text += " without the code that comes with the model, which is never run"
    if written_by := config.get("transformers_version"):
        text += f" (config.json was written by {written_by})"
    return f"{text}. {_supported()}"


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    if found := config.get("quantization_config"):
        method = found.get("quant_method", "unknown") if isinstance(found, Mapping) else found
        raise QuantizeError(
            f"its weights are quantized already ({method}): give the model that it was made from"
        )


def _refuse_later_config(config: Mapping[str, Any]) -> None:
    if config.get("rope_parameters"):
        raise QuantizeError(
            "config.json has `rope_parameters`, the form of transformers 5, which the transformers "
            "here would ignore: write `rope_theta` and `rope_scaling` instead"
        )


def _supported() -> str:
    families = ", ".join(f"{name} ({family})" for name, family in FUSED.items())
    return (
        f"Supported are, as fused graphs: {families}; and through optimum's own export the model "
        f"types {', '.join(sorted(PORTABLE))}"
    )


def _tasks(model_type: str) -> Mapping[str, Any]:
    import optimum.exporters.onnx.model_configs  # noqa: F401  registers what can be exported
    from optimum.exporters.tasks import TasksManager

    try:
        found: Mapping[str, Any] = TasksManager.get_supported_tasks_for_model_type(
            model_type, "onnx", library_name="transformers"
        )
    except KeyError:
        return {}
    return found
