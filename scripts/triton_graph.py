"""A decoder graph without its KV cache: `input_ids, attention_mask` -> `logits`, as the tutorial
serves it on Triton.

The weights and kernels are those of the model folder; the cache is fed with nothing and what it
would keep is dropped, so every token reads the whole prompt again. Rows are padded on the right.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
from onnx import NodeProto, TensorProto, helper

from app.errors import UnservableModel
from app.graph import Graph, read_graph
from quantize import MODEL_FILE
from quantize.errors import QuantizeError
from quantize.graph_copy import copy_graph
from quantize.graph_file import load_graph

NAMES = ("input_ids", "attention_mask", "logits")
_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


class CannotServeLogits(Exception):
    """The folder's graph will not do; the message says why."""


def write_without_cache(folder: Path, target: Path) -> Graph:
    """Writes the graph of a model folder into `target`, as `model.onnx` and its data file, and
    returns what was read of it.

    Raises CannotServeLogits.
    """
    try:
        return _write(folder, target)
    except (UnservableModel, QuantizeError) as error:
        raise CannotServeLogits(str(error)) from error


def _write(folder: Path, target: Path) -> Graph:
    graph = read_graph(folder)
    found = (graph.input_ids, graph.attention_mask, graph.logits)
    if found != NAMES:
        raise CannotServeLogits(
            f"{graph.path} has {', '.join(found)}; {', '.join(NAMES)} are needed"
        )
    copy_graph(graph.path, target)
    model = load_graph(target / MODEL_FILE)
    cut_cache(model.graph, graph)
    (target / MODEL_FILE).write_bytes(model.SerializeToString())
    return graph


def cut_cache(model: onnx.GraphProto, graph: Graph) -> None:
    """Computes the inputs for past and positions, and takes the outputs for the cache away."""
    nodes = [*_empty_past(model, graph)]
    if graph.position_ids is not None:
        nodes += _positions(model, graph.attention_mask, graph.position_ids)
    nodes += model.node
    for node in nodes:
        while node.input and not node.input[-1]:
            del node.input[-1]  # of newer operators: Triton's ONNX Runtime may be older than ours
    del model.node[:]
    model.node.extend(nodes)
    _keep(model.input, NAMES)
    _keep(model.output, NAMES)


def _empty_past(model: onnx.GraphProto, graph: Graph) -> Iterable[NodeProto]:
    """Keys and values of no tokens, (rows, heads, 0, head_dim), under each name."""
    shape = [graph.num_kv_heads, 0, graph.head_dim]
    model.initializer.append(helper.make_tensor("no_cache/shape", TensorProto.INT64, [3], shape))
    yield helper.make_node("Shape", [graph.input_ids], ["no_cache/rows"], start=0, end=1)
    yield helper.make_node("Concat", ["no_cache/rows", "no_cache/shape"], ["no_cache/all"], axis=0)
    zero = helper.make_tensor("zero", _TYPES[graph.kv_type], [1], [0])
    for name in graph.past:
        yield helper.make_node("ConstantOfShape", ["no_cache/all"], [name], value=zero)


def _positions(model: onnx.GraphProto, mask: str, positions: str) -> Iterable[NodeProto]:
    """Each token's, counted from its row's first real one."""
    for name, value in (("zero", 0), ("one", 1)):
        tensor = helper.make_tensor(f"no_cache/{name}", TensorProto.INT64, [1], [value])
        model.initializer.append(tensor)
    yield helper.make_node("CumSum", [mask, "no_cache/one"], ["no_cache/counts"])
    yield helper.make_node("Sub", ["no_cache/counts", "no_cache/one"], ["no_cache/from_0"])
    yield helper.make_node("Max", ["no_cache/from_0", "no_cache/zero"], [positions])


def _keep(values: Any, names: tuple[str, ...]) -> None:
    kept = [value for value in values if value.name in names]
    del values[:]
    values.extend(kept)
