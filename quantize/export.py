"""HF folder -> fused decoder graph (GroupQueryAttention), fp32 or fp16, ready for the engine.

onnxruntime-genai's model builder writes the graph. What it gets wrong is mended then, on the small
protobuf only (weights stay in their data file): windows and rotary embeddings are transformers'
own (attention.py, rotary.py), and the LM head is fed with the last real token of each row instead
of every position.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper
from transformers import AutoConfig, PretrainedConfig

from . import MODEL_FILE
from .attention import set_attention
from .errors import QuantizeError
from .forms import Dtype
from .graph_file import load_graph
from .json_file import read_json
from .mapped_weights import mapped_weights
from .query_scale import fold_scales
from .rotary import context_length, write_caches

_LM_HEAD = "/lm_head/MatMul"
_SEQLENS_K = "/model/attn_mask_reformat/attn_mask_subgraph/Sub/Cast/output_0"


def export_fused(
    source: Path,
    folder: Path,
    on_stage: Callable[[str], None],
    dtype: Dtype = "fp32",
) -> None:
    """Writes `model.onnx` and its data file into `folder`; weights, keys and values are of `dtype`.

    `source` has been checked (hf_folder.py). `on_stage` hears one short line per stage and layer.
    """
    config = read_config(source)
    with tempfile.TemporaryDirectory(dir=folder, prefix="builder-") as scratch:
        prepared, built = Path(scratch) / "source", Path(scratch) / "built"
        _prepare(source, prepared, config)
        _run_builder(prepared, built, dtype, on_stage)
        for name in (MODEL_FILE, f"{MODEL_FILE}.data"):
            shutil.move(built / name, folder / name)
    model = load_graph(folder / MODEL_FILE)
    set_attention(model.graph, config)
    write_caches(model.graph, folder, config)
    if dtype == "fp32":
        fold_scales(model.graph, folder)
    keep_last_token_logits(model.graph)
    onnx.save(model, folder / MODEL_FILE)


def read_config(source: Path) -> PretrainedConfig:
    """Raises QuantizeError if transformers does not know the model type."""
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # ValueError, KeyError, OSError and more, as the file has it
        raise QuantizeError(f"{source / 'config.json'} cannot be used: {error}") from error


def _prepare(source: Path, folder: Path, config: PretrainedConfig) -> None:
    """Links to the files of `source`, with a config.json in the builder's reach.

    Rotary embeddings and windows are simplified to what the builder can write; attention.py and
    rotary.py set the real ones. For longrope it would switch all rows of a batch to the long
    factors as soon as one is long.
    """
    folder.mkdir()
    for file in source.resolve().iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    length = context_length(config)
    simple: dict[str, Any] = {
        "rope_scaling": None,
        "max_position_embeddings": length,
        "original_max_position_embeddings": length,
    }
    if getattr(config, "no_rope_layers", None):
        simple["no_rope_layers"] = [1] * config.num_hidden_layers
    fields = read_json(source / "config.json")
    (folder / "config.json").write_text(json.dumps(fields | simple))


def _run_builder(source: Path, output: Path, dtype: Dtype, on_stage: Callable[[str], None]) -> None:
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
                precision=dtype,
                # Decides the form only: for the CPU it would write fp16 without
                # GroupQueryAttention.
                execution_provider="cpu" if dtype == "fp32" else "cuda",
                cache_dir=str(output / "cache"),
                hf_token="false",
                hf_remote=False,  # never run code that comes with a model
                # The tied form feeds the LM head from a Transpose, which no quantizer looks into.
                shared_embeddings=False,
            )
        except Exception as error:  # whatever transformers finds wrong with the weights, too
            raise QuantizeError(f"the graph builder cannot export it: {error}") from error


class _Lines(io.TextIOBase):
    """A text stream that hands each line written to it to a function."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line

    def write(self, text: str) -> int:
        for line in filter(None, map(str.strip, text.splitlines())):
            self._on_line(line)
        return len(text)


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
