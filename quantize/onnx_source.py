"""A plain ONNX export as a source: to be quantized, not exported again.

Its graph is read (not its weights) to say which form it has and to refuse what cannot be served;
beside it, or above its `onnx` folder, lie config.json and the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from . import MODEL_FILE
from .errors import QuantizeError
from .external_data import external_places, is_external
from .forms import Dtype, Form, known_problem, rope_kind
from .graph_facts import Value, form_problems, graph_facts
from .graph_file import all_tensors, load_graph
from .hf_folder import check_tokenizer, embedded, read_config_json
from .space import Size

_QUANTIZED = {
    *{"DequantizeLinear", "DynamicQuantizeLinear", "MatMulBnb4", "MatMulInteger"},
    *{"MatMulIntegerToFloat", "MatMulNBits", "QLinearMatMul", "QMoE"},
}
_WIDE = 1024  # elements of a weight; smaller tensors may be constants of any type
_FLOATS = {
    *{TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE},
    *{TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2},
}


@dataclass(frozen=True, slots=True)
class Export:
    """An ONNX export that can be quantized and served."""

    folder: Path  # of config.json and tokenizer
    form: Form
    dtype: Dtype
    size: Size


def find_graph(path: Path) -> Path | None:
    """The graph that `path` (a folder or an .onnx file) stands for; None if it holds none.

    Raises QuantizeError if there are several and none is called model.onnx.
    """
    if path.is_file():
        return path if path.suffix == ".onnx" else None
    graphs = sorted(path.glob("*.onnx")) or sorted(path.glob("onnx/*.onnx"))
    named = [graph for graph in graphs if graph.name == MODEL_FILE]
    if len(graphs) > 1 and not named:
        raise QuantizeError(
            f"{path} holds several graphs ({', '.join(graph.name for graph in graphs)}): name one "
            "of them, or export anew into one graph (optimum's decoder_*.onnx are its older form)"
        )
    return next(iter(named or graphs), None)


def check_onnx(graph: Path) -> Export:
    """Raises QuantizeError with the reason if it cannot be quantized and served, or a file is
    missing."""
    above = graph.parent.name == "onnx" and not (graph.parent / "config.json").is_file()
    folder = graph.parent.parent if above else graph.parent
    config = read_config_json(folder, f"{folder} cannot be used with {graph.name}")
    model = load_graph(graph)
    form, dtype = form_of(model, graph), dtype_of(model, graph)
    _refuse_frozen(form, config, graph)
    _check_layers(model, folder, graph)
    places = external_places(model, graph.parent)
    check_tokenizer(folder)
    num_parameters = sum(math.prod(tensor.dims) for tensor in all_tensors(model))
    num_bytes = sum(place.length for place in set(places)) + sum(
        tensor.ByteSize() for tensor in all_tensors(model) if not is_external(tensor)
    )
    size = Size(num_parameters, embedded(config), num_bytes, form=form, is_exported=False)
    return Export(folder, form, dtype, size)


def dtype_of(model: onnx.ModelProto, graph: Path) -> Dtype:
    """Of the weights; norms and rotary caches may be wider. Raises QuantizeError for others."""
    found = {t.data_type for t in all_tensors(model) if math.prod(t.dims) >= _WIDE} & _FLOATS
    if unknown := found - {TensorProto.FLOAT, TensorProto.FLOAT16}:
        names = ", ".join(TensorProto.DataType.Name(kind).lower() for kind in sorted(unknown))
        raise QuantizeError(f"{graph} has weights in {names}: export it in float32")
    return "fp16" if TensorProto.FLOAT16 in found else "fp32"


def form_of(model: onnx.ModelProto, graph: Path) -> Form:
    """Raises QuantizeError, saying what was found, for a graph that cannot be used."""
    facts = graph_facts(model)
    operators = {node.op_type for node in model.graph.node}
    problems = []
    if found := sorted(operators & _QUANTIZED):
        problems.append(f"it is quantized already ({', '.join(found)})")
    if "use_cache_branch" in facts.inputs:
        problems.append("it is two graphs merged by use_cache_branch, optimum's older form")
    problems += form_problems(facts)
    if not all(_is_cache(value) for value in facts.past):
        problems.append("its cache is not laid out as (rows, heads, tokens, head_dim)")
    if facts.form == "portable" and "position_ids" not in facts.inputs:
        problems.append("it takes no position_ids, so the positions of its tokens cannot be told")
    if problems:
        raise QuantizeError(f"{graph} cannot be used: {'; '.join(problems)}")
    return facts.form


def _is_cache(value: Value) -> bool:
    return len(value.dims) == 4 and all((value.dims[axis] or 0) > 0 for axis in (1, 3))


def _refuse_frozen(form: Form, config: Mapping[str, Any], graph: Path) -> None:
    """What tracing has frozen in the graph. Longrope is right up to a length, and capped there."""
    if form == "fused" or rope_kind(config) == "longrope":
        return
    if problem := known_problem(str(config.get("model_type")), config):
        raise QuantizeError(f"{graph} cannot be used: {problem}")


def _check_layers(model: onnx.ModelProto, folder: Path, graph: Path) -> None:
    # Imported here: transformers takes seconds, and a wrong graph should be told at once.
    from .export import read_config

    expected = read_config(folder).num_hidden_layers
    keys = [v.name for v in model.graph.input if v.name.startswith("past_key_values.")]
    num_layers = len({name.split(".")[1] for name in keys})
    if num_layers != expected:
        raise QuantizeError(
            f"{graph} has the cache of {num_layers} layers, and config.json says {expected}: they "
            "belong to different models"
        )
