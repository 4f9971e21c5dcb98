"""Replaces the constant matrices of a graph by quantized ones, weight by weight.

How a matrix is replaced is a method's business (per_token.py, weight_only.py, dynamic.py); what is
left is copied, with the edits that were noted for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import onnx
from onnx import helper

from . import MODEL_FILE
from .errors import QuantizeError
from .external_data import is_external
from .graph_file import all_tensors, load_graph
from .tensors import Weights, WeightWriter, read_outside

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
    method: Callable[[onnx.ModelProto, Weights], Method],
    on_matrix: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Writes the graph in `source`, quantized, into `folder`; what was done, for the record.

    Raises QuantizeError if there is nothing to quantize.
    """
    model = load_graph(source / MODEL_FILE)
    weights = Weights(model, source)
    _to_products(model.graph, weights)
    chosen = method(model, weights)
    num_matrices = sum(is_matrix(node, weights) for node in model.graph.node)
    if not num_matrices:
        raise QuantizeError("the graph has no constant matrix, so there is nothing to quantize")
    with WeightWriter(folder) as writer:
        nodes = list(_replaced(model.graph, weights, chosen, writer, on_matrix))
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        _copy_rest(model, source, weights, writer)
        _import_domain(model)
        writer.save(model)
    return {"operator": chosen.operator, "matrices": num_matrices} | chosen.parameters


def _replaced(
    graph: onnx.GraphProto,
    weights: Weights,
    method: Method,
    writer: WeightWriter,
    on_matrix: Callable[[], object],
) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        if is_matrix(node, weights):
            yield from method.matrix(node, writer)
            on_matrix()
        elif is_embedding(node, weights):
            yield from method.embedding(node, writer)
        else:
            yield node


def is_matrix(node: onnx.NodeProto, weights: Weights) -> bool:
    return node.op_type == "MatMul" and _is_table(node.input[1], weights)


def is_embedding(node: onnx.NodeProto, weights: Weights) -> bool:
    """A table that is looked up by token, or by position."""
    by_row = not any(a.name == "axis" and a.i != 0 for a in node.attribute)
    return node.op_type == "Gather" and by_row and _is_table(node.input[0], weights)


def _is_table(name: str, weights: Weights) -> bool:
    """A constant of two axes, of floating point, and large enough."""
    return (
        name in weights
        and len(weights.shape(name)) == 2
        and math.prod(weights.shape(name)) >= _SMALLEST
        and weights.is_float(name)
    )


def _to_products(graph: onnx.GraphProto, weights: Weights) -> None:
    """Other forms of the same become MatMuls by a weight (in, out): `Gemm`, which adds a bias, too
    (GPT-2, OPT), and products with a weight that another node transposes (tied LM heads)."""
    transposed = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Transpose" and node.input[0] in weights and _is_matrix_transpose(node)
    }
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "Gemm" and node.input[1] in weights and _is_plain(node):
            nodes += _split(node, weights)
            continue
        if node.op_type == "MatMul" and node.input[1] in transposed:
            node.input[1] = weights.transposed(transposed[node.input[1]])
        nodes.append(node)
    read = {value.name for value in graph.output}.union(*(names_read(node) for node in nodes))
    kept = [node for node in nodes if node.output[0] not in transposed.keys() - read]
    del graph.node[:]
    graph.node.extend(kept)


def _is_matrix_transpose(node: onnx.NodeProto) -> bool:
    return all(list(a.ints) == [1, 0] for a in node.attribute if a.name == "perm")


def _is_plain(gemm: onnx.NodeProto) -> bool:
    """x @ w + b, whichever way `w` lies."""
    expected: dict[str, float] = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    return all(helper.get_attribute_value(a) == expected.get(a.name, a.i) for a in gemm.attribute)


def _split(gemm: onnx.NodeProto, weights: Weights) -> list[onnx.NodeProto]:
    x, weight, *bias = gemm.input
    output = gemm.output[0]
    if any(a.name == "transB" and a.i for a in gemm.attribute):
        weight = weights.transposed(weight)
    if not bias or not bias[0]:
        return [helper.make_node("MatMul", [x, weight], [output], gemm.name)]
    product = f"{output}/product"
    return [
        helper.make_node("MatMul", [x, weight], [product], gemm.name),
        helper.make_node("Add", [product, bias[0]], [output], f"{output}/bias"),
    ]


def _copy_rest(
    model: onnx.ModelProto, source: Path, weights: Weights, writer: WeightWriter
) -> None:
    """What the nodes still use, in the type that it is stored in."""
    used = {name for node in model.graph.node for name in names_read(node)}
    used |= {value.name for value in model.graph.output}
    for name in (name for name in weights if name in used):
        array = weights.stored(name)
        if weights.is_edited(name):
            array = weights.read(name).astype(array.dtype)
        writer.add(name, array)
    del model.graph.initializer[:]
    for tensor in all_tensors(model):  # in attributes, and in the graphs inside nodes
        if is_external(tensor):
            writer.place(tensor, read_outside(tensor, source))


def names_read(node: onnx.NodeProto) -> set[str]:
    """Its inputs, and what the graphs inside it may take from outside."""
    names = {name for name in node.input if name}
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            names |= {value.name for value in graph.output}
            names.update(*(names_read(inner) for inner in graph.node))
    return names


def _import_domain(model: onnx.ModelProto) -> None:
    if all(opset.domain != MICROSOFT for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
