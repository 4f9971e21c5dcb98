"""Moves the softmax's scale out of the attention nodes into the weights that make the queries.

`softmax(s q k)` is `softmax((s q) k)`, and a rotary embedding, which lies between, does not mind.
ONNX Runtime's CPU kernel hands `s` to its matrix product, which has fast code for one row (a token
that is decoded) when it multiplies by 1 only. On CUDA nothing is gained.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .external_data import is_external, place_of
from .rewrite import names_read

_Edit = tuple[TensorProto, int]  # a weight, and how many of its last axis' values belong to queries


@dataclass(frozen=True, slots=True)
class _Attention:
    node: onnx.NodeProto
    head_dim: int

    @property
    def num_query_values(self) -> int:
        """Of one token."""
        return int(_attributes(self.node)["num_heads"]) * self.head_dim

    @property
    def scale(self) -> float:
        return float(_attributes(self.node).get("scale", 0)) or 1 / math.sqrt(self.head_dim)


def fold_scales(graph: onnx.GraphProto, folder: Path) -> None:
    """In every GroupQueryAttention node whose queries come from weights of its own, in `folder`.

    Exact for scales that are a power of two (heads of 64 or 256); else a weight is rounded once.
    """
    inputs = {value.name: value for value in graph.input}
    sources = _Sources(graph)
    for node in graph.node:
        if node.op_type != "GroupQueryAttention":
            continue
        head_dim = inputs[node.input[3]].type.tensor_type.shape.dim[3].dim_value
        attention = _Attention(node, head_dim)
        edits = sources.of_queries(attention)
        if edits is None:
            continue
        for tensor, num_values in edits:
            _multiply(tensor, num_values, np.float32(attention.scale), folder)
        kept = [attribute for attribute in node.attribute if attribute.name != "scale"]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("scale", 1.0)])


class _Sources:
    """Where the values of a graph come from."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._writers = {name: node for node in graph.node for name in node.output if name}
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        self._num_readers = Counter(name for node in graph.node for name in names_read(node))
        self._num_readers.update(value.name for value in graph.output)

    def of_queries(self, attention: _Attention) -> list[_Edit] | None:
        """The weights that the queries are proportional to; None if others depend on them."""
        edits: list[_Edit] = []
        value, num_values = attention.node.input[0], attention.num_query_values
        while self._num_readers[value] == 1 and value in self._writers:
            node = self._writers[value]
            constants = [name for name in node.input if name in self._weights]
            if node.op_type == "Reshape":
                value = node.input[0]
                continue
            if len(constants) != 1 or self._num_readers[constants[0]] != 1:
                return None
            weight = self._weights[constants[0]]
            if node.op_type == "SimplifiedLayerNormalization":  # of each head; its input is free
                return [*edits, (weight, attention.head_dim)]
            if node.op_type == "MatMul" and node.input[1] == weight.name:
                return [*edits, (weight, num_values)]
            if node.op_type != "Add":
                return None
            edits.append((weight, num_values))
            value = next(name for name in node.input if name != weight.name)
        return None


def _multiply(tensor: TensorProto, num_values: int, scale: np.float32, folder: Path) -> None:
    """The first values of the last axis, where they lie."""
    if is_external(tensor):
        place = place_of(tensor, folder)
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        mapped = np.memmap(place.file, dtype, "r+", place.offset, tuple(tensor.dims))
        mapped[..., :num_values] *= scale
        mapped.flush()
    else:
        array = numpy_helper.to_array(tensor).copy()
        array[..., :num_values] *= scale
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _attributes(node: onnx.NodeProto) -> dict[str, int | float]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}
