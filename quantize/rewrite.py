"""Replaces the constant matrices of a graph by quantized ones, weight by weight.

How a matrix is replaced is a method's business (per_token.py, weight_only.py, dynamic.py); what is
left is copied, with the edits that were noted for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import onnx
from onnx import helper

from . import MODEL_FILE
from .graph_file import load_graph
from .tensors import Weights, WeightWriter

MICROSOFT = "com.microsoft"
_SMALLEST = 1 << 12  # values of a matrix worth replacing


class Method(Protocol):
    """One way to quantize. Nodes are handed to it in the order in which they run."""

    operator: str  # that the matrices become
    parameters: dict[str, Any]  # for quantization.json

    def matrix(self, node: onnx.NodeProto, writer: WeightWriter) -> list[onnx.NodeProto]:
        """Stands for a MatMul whose second input is a weight of shape (in, out)."""

    def embedding(self, node: onnx.NodeProto, writer: WeightWriter) -> list[onnx.NodeProto]:
        """Stands for a Gather of rows of a weight of shape (rows, width)."""


def rewrite(
    source: Path,
    folder: Path,
    method: Callable[[onnx.GraphProto, Weights], Method],
    on_matrix: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Writes the graph in `source`, quantized, into `folder`; what was done, for the record."""
    model = load_graph(source / MODEL_FILE)
    weights = Weights(model, source)
    _split_gemms(model.graph, weights)
    chosen = method(model.graph, weights)
    nodes: list[onnx.NodeProto] = []
    num_matrices = 0
    with WeightWriter(folder) as writer:
        for node in model.graph.node:
            if is_matrix(node, weights):
                nodes += chosen.matrix(node, writer)
                num_matrices += 1
                on_matrix()
            elif is_embedding(node, weights):
                nodes += chosen.embedding(node, writer)
            else:
                nodes.append(node)
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        _copy_rest(model.graph, weights, writer)
        _import_domain(model)
        writer.save(model)
    return {"operator": chosen.operator, "matrices": num_matrices} | chosen.parameters


def is_matrix(node: onnx.NodeProto, weights: Weights) -> bool:
    return (
        node.op_type == "MatMul"
        and node.input[1] in weights
        and len(weights.shape(node.input[1])) == 2
        and math.prod(weights.shape(node.input[1])) >= _SMALLEST
        and weights.is_float(node.input[1])
    )


def is_embedding(node: onnx.NodeProto, weights: Weights) -> bool:
    """A table that is looked up by token, or by position."""
    return (
        node.op_type == "Gather"
        and node.input[0] in weights
        and len(weights.shape(node.input[0])) == 2
        and math.prod(weights.shape(node.input[0])) >= _SMALLEST
        and weights.is_float(node.input[0])
        and not any(a.name == "axis" and a.i != 0 for a in node.attribute)
    )


def _split_gemms(graph: onnx.GraphProto, weights: Weights) -> None:
    """`Gemm` is MatMul and Add in one; GPT-2 has them."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        plain = all(a.f == 1.0 if a.name in ("alpha", "beta") else a.i == 0 for a in node.attribute)
        if node.op_type != "Gemm" or not plain or node.input[1] not in weights:
            nodes.append(node)
            continue
        product = f"{node.output[0]}/product" if len(node.input) > 2 else node.output[0]
        nodes.append(helper.make_node("MatMul", node.input[:2], [product], node.name))
        if len(node.input) > 2:
            nodes.append(
                helper.make_node("Add", [product, node.input[2]], node.output, f"{node.name}/bias")
            )
    del graph.node[:]
    graph.node.extend(nodes)


def _copy_rest(graph: onnx.GraphProto, weights: Weights, writer: WeightWriter) -> None:
    """What the nodes still use, in the type that it is stored in."""
    used = {name for node in graph.node for name in node.input if name}
    used |= {name for node in graph.node for name in _inner_names(node)}
    used |= {value.name for value in graph.output}
    for name in [tensor.name for tensor in graph.initializer if tensor.name in used]:
        array = weights.stored(name)
        writer.add(
            name, weights.read(name).astype(array.dtype) if weights.is_edited(name) else array
        )


def _inner_names(node: onnx.NodeProto) -> set[str]:
    """What the graphs inside a node may take from outside."""
    names: set[str] = set()
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                names.update(inner.input)
                names |= _inner_names(inner)
    return names


def _import_domain(model: onnx.ModelProto) -> None:
    if all(opset.domain != MICROSOFT for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
