"""The part of `check` about attention: sliding windows, and how far the rotary table reaches."""

from __future__ import annotations

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .families import FUSED, layer_attention
from .graph_facts import GraphFacts
from .model_folder import ModelFolder
from .report import Report


def check_window(facts: GraphFacts, folder: ModelFolder, report: Report) -> None:
    """The sliding window of each layer is Hugging Face's; -1 where it has none.

    Some builders leave a window out: a folder from elsewhere is served all the same.
    """
    if folder.config is None:
        return
    config, context = folder.config.get_text_config(), folder.context_length
    if facts.form == "portable":
        window = getattr(config, "sliding_window", None)
        if isinstance(window, int) and (context is None or window < context):
            text = f"config.json has a window of {window}; a portable graph does not tell its own"
            report.warning("window", text)
        return
    try:
        expected = _expected_windows(config, len(facts.windows))
    except (TypeError, ValueError) as error:  # a list that is not as long as the layers are many
        report.error("window", f"config.json has no usable layers: {error}", "config.json")
        return
    if len(expected) != len(facts.windows):
        return  # told with the number of layers
    if not all(isinstance(window, int) for window in expected):
        text = f"config.json has {config.sliding_window!r} for sliding_window; a number is needed"
        report.error("window", text, "config.json")
        return
    # A window as wide as the context hides nothing.
    reach = [
        [-1 if context and w >= context else w for w in ws] for ws in (facts.windows, expected)
    ]
    if reach[0] == reach[1]:
        shown = ", ".join(map(str, sorted(set(facts.windows))))
        report.ok("window", f"local_window_size {shown} (-1: none), as in config.json")
        return
    layer = next(i for i, (a, b) in enumerate(zip(*reach, strict=True)) if a != b)
    tell = report.error if folder.is_ours else report.warning
    tell(
        "window",
        f"layer {layer} has local_window_size {facts.windows[layer]}, config.json asks for "
        f"{expected[layer]}: long prompts get other answers than in transformers",
    )


def _expected_windows(config: PretrainedConfig, num_layers: int) -> list[int]:
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) in FUSED:
        return [layer.window for layer in layer_attention(config)]
    window = getattr(config, "sliding_window", None)
    if window is None:
        return [-1] * num_layers
    types = getattr(config, "layer_types", None)
    if not types or len(types) != num_layers:
        return [window] * num_layers
    return [window if kind == "sliding_attention" else -1 for kind in types]


def check_rope(facts: GraphFacts, folder: ModelFolder, report: Report) -> None:
    """The rotary table reaches as far as the context that the folder promises."""
    context, length = folder.context_length, facts.cos_cache_length
    if context is None or length is None:
        return
    scaling = getattr(folder.config, "rope_scaling", None)
    scaling = scaling if isinstance(scaling, dict) else {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    text = f"rotary table ({kind}) of {length:,} positions, context of {context:,}"
    if length < context:
        report.error("context", f"{text}: longer prompts would read past its end")
    else:
        report.ok("context", text)
