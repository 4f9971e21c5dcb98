"""HF folder -> fused decoder graph (GroupQueryAttention), fp32, ready for the engine.

onnxruntime-genai's model builder writes the graph. Two edits follow, both on the small protobuf
only (weights stay in their data file): HF's sliding window is set, and the LM head is fed with the
last real token of each row instead of every position.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper
from transformers import AutoConfig, PretrainedConfig

from . import MODEL_FILE
from .errors import QuantizeError
from .mapped_weights import mapped_weights

_LM_HEAD = "/lm_head/MatMul"
_SEQLENS_K = "/model/attn_mask_reformat/attn_mask_subgraph/Sub/Cast/output_0"


def export_fused(source: Path, folder: Path, on_stage: Callable[[str], None]) -> None:
    """Writes `model.onnx` and its data file into `folder`.

    `on_stage` hears one short line per stage and layer. Raises QuantizeError for an architecture
    that the builder does not know, or that it would export wrongly.
    """
    config = read_config(source)
    _refuse_ambiguous_lm_head(config)
    _refuse_longrope(config)
    with tempfile.TemporaryDirectory(dir=folder, prefix="builder-") as scratch:
        _run_builder(source, Path(scratch), on_stage)
        for name in (MODEL_FILE, f"{MODEL_FILE}.data"):
            shutil.move(Path(scratch) / name, folder / name)
    model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    set_sliding_window(model.graph, config)
    keep_last_token_logits(model.graph)
    onnx.save(model, folder / MODEL_FILE)


def read_config(source: Path) -> PretrainedConfig:
    """Raises QuantizeError if transformers does not know the model type."""
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # ValueError, KeyError, OSError and more, as the file has it
        raise QuantizeError(f"{source / 'config.json'} cannot be used: {error}") from error


def _refuse_longrope(config: PretrainedConfig) -> None:
    """The builder switches all rows of a batch to the long factors as soon as one is long."""
    scaling = getattr(config, "rope_scaling", None) or {}
    if scaling.get("rope_type", scaling.get("type")) in ("longrope", "su", "yarn"):
        raise QuantizeError(
            "its rotary embedding changes with the length of the prompt (rope_scaling "
            f"{scaling.get('rope_type', scaling.get('type'))!r}), which is not supported yet: "
            "mixed batches would get wrong answers. Take the 4k variant of the model."
        )


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


def _run_builder(source: Path, output: Path, on_stage: Callable[[str], None]) -> None:
    from onnxruntime_genai.models.builder import create_model

    with (
        contextlib.redirect_stdout(_Lines(on_stage)),
        contextlib.redirect_stderr(io.StringIO()),
        mapped_weights(source),
    ):
        try:
            create_model(
                model_name=None,
                input_path=str(source),
                output_dir=str(output),
                precision="fp32",
                execution_provider="cpu",
                cache_dir=str(output / "cache"),
                hf_token="false",
                hf_remote=False,  # never run code that comes with a model
                # The tied form feeds the LM head from a Transpose, which no quantizer looks into.
                shared_embeddings=False,
            )
        except NotImplementedError:
            names = ", ".join(read_config(source).architectures or ["none"])
            raise QuantizeError(
                f"its architecture ({names}) is not known to the fused-graph builder"
            ) from None


class _Lines(io.TextIOBase):
    """A text stream that hands each line written to it to a function."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line

    def write(self, text: str) -> int:
        for line in filter(None, map(str.strip, text.splitlines())):
            self._on_line(line)
        return len(text)


def set_sliding_window(graph: onnx.GraphProto, config: PretrainedConfig) -> None:
    """Sets GroupQueryAttention's `local_window_size` to HF's `sliding_window` in all layers.

    The builder leaves it at -1 (no window) for Phi-3, although HF applies it. Where the builder has
    set windows itself, it knows which layers have one.
    """
    window = getattr(config, "sliding_window", None)
    nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    if window is None or any(_window(node) != -1 for node in nodes):
        return
    if "full_attention" in (getattr(config, "layer_types", None) or []):
        raise QuantizeError("only some of its layers have a sliding window: not supported yet")
    for node in nodes:
        kept = [a for a in node.attribute if a.name != "local_window_size"]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("local_window_size", window)])


def _window(node: onnx.NodeProto) -> int:
    return next((a.i for a in node.attribute if a.name == "local_window_size"), -1)


def keep_last_token_logits(graph: onnx.GraphProto) -> None:
    """Feeds the LM head with the hidden state of each row's last real token only.

    `hidden (rows, S, H)` -> GatherND at `min(seqlens_k, S-1)` -> `(rows, 1, H)`; `seqlens_k` is
    `attention_mask.sum(1) - 1`, so right-padded first prompts, chunks with a past and decode steps
    all come out right, and a prefill never allocates `(S, vocab)` logits.
    """
    lm_head = _only([node for node in graph.node if node.name == _LM_HEAD], "LM head")
    hidden = lm_head.input[0]
    p = "/lm_head/last_token"
    graph.initializer.append(helper.make_tensor(f"{p}/one", TensorProto.INT64, [1], [1]))
    nodes = [
        helper.make_node("Shape", [hidden], [f"{p}/length"], f"{p}/Shape", start=1, end=2),
        helper.make_node("Sub", [f"{p}/length", f"{p}/one"], [f"{p}/last"], f"{p}/Sub"),
        helper.make_node("Cast", [_SEQLENS_K], [f"{p}/seqlens"], f"{p}/Cast", to=TensorProto.INT64),
        helper.make_node("Min", [f"{p}/seqlens", f"{p}/last"], [f"{p}/index"], f"{p}/Min"),
        helper.make_node(
            "Unsqueeze", [f"{p}/index", f"{p}/one"], [f"{p}/indices"], f"{p}/Unsqueeze"
        ),
        helper.make_node(
            "GatherND", [hidden, f"{p}/indices"], [f"{p}/rows"], f"{p}/GatherND", batch_dims=1
        ),
        helper.make_node(
            "Unsqueeze", [f"{p}/rows", f"{p}/one"], [f"{p}/hidden"], f"{p}/Unsqueeze_1"
        ),
    ]
    lm_head.input[0] = f"{p}/hidden"
    position = next(i for i, node in enumerate(graph.node) if node.name == _LM_HEAD)
    for offset, node in enumerate(nodes):
        graph.node.insert(position + offset, node)
    logits = _only([out for out in graph.output if out.name == "logits"], "logits output")
    logits.type.tensor_type.shape.dim[1].dim_value = 1
    # Shapes noted for values behind the LM head are stale now; ONNX Runtime infers them anew.
    del graph.value_info[:]


def _only(found: list[Any], what: str) -> Any:
    if len(found) != 1:
        raise QuantizeError(f"the graph has {len(found)} nodes for its {what}; expected one")
    return found[0]
