"""Which files a graph keeps its tensors in, read from the protobuf; no weights are loaded.

A tensor may lie outside wherever there is one: initializers, node attributes, the graphs inside
nodes, functions. Names of data files differ from tool to tool, so none is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx
from onnx import AttributeProto, TensorProto, helper

_BITS: dict[int, int] = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    name: str
    location: str  # as the graph has it: relative to the graph file, if all is well
    offset: int
    num_bytes: int  # what its type and shape need
    stated_bytes: int | None  # `length`, where the graph states one

    @property
    def end(self) -> int:
        return self.offset + max(self.num_bytes, self.stated_bytes or 0)


def external_tensors(model: onnx.ModelProto) -> list[ExternalTensor]:
    """Raises ValueError for an entry that cannot be read."""
    outside = (t for t in all_tensors(model) if t.data_location == TensorProto.EXTERNAL)
    return [_external(tensor) for tensor in outside]


def all_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)
        yield from _of_attributes(function.attribute_proto)
    for training in model.training_info:
        yield from _of_graph(training.initialization)
        yield from _of_graph(training.algorithm)


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Those of functions and of the graphs inside nodes, too."""
    yield from _nested(model.graph.node)
    for function in model.functions:
        yield from _nested(function.node)


def _nested(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in _graphs(attribute):
                yield from _nested(graph.node)


def _of_graph(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        yield from _of_attributes(node.attribute)


def _of_attributes(attributes: Iterable[AttributeProto]) -> Iterator[TensorProto]:
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        sparse = [*attribute.sparse_tensors]
        if attribute.HasField("sparse_tensor"):
            sparse.append(attribute.sparse_tensor)
        for tensor in sparse:
            yield from (tensor.values, tensor.indices)
        for graph in _graphs(attribute):
            yield from _of_graph(graph)


def _graphs(attribute: AttributeProto) -> Iterator[onnx.GraphProto]:
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def _external(tensor: TensorProto) -> ExternalTensor:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = tensor.name or "a tensor without a name"
    if not entries.get("location"):
        raise ValueError(f"{name} lies outside the graph, but no file is named for it")
    try:
        offset = int(entries.get("offset", 0))
        stated = int(entries["length"]) if "length" in entries else None
        num_bytes = _num_bytes(tensor)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{name} in {entries['location']} cannot be read: {error}") from error
    if offset < 0 or (stated or 0) < 0:
        raise ValueError(f"{name} in {entries['location']} has a negative offset or length")
    return ExternalTensor(name, entries["location"], offset, num_bytes, stated)


def _num_bytes(tensor: TensorProto) -> int:
    bits = _BITS.get(tensor.data_type)
    if bits is None:
        bits = 8 * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    num_elements: int = math.prod(tensor.dims)
    return (num_elements * bits + 7) // 8
