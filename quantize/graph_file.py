"""A graph's protobuf, without the weights beside it: read, and walked through.

Tensors and nodes stand in more places than the main graph's lists: in node attributes, in the
graphs inside nodes, in functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto

from .errors import QuantizeError

_LFS_POINTER = b"version https://git-lfs"


def load_graph(path: Path) -> onnx.ModelProto:
    """Raises QuantizeError if the file is no graph, or not all of one."""
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise QuantizeError(
                    f"{path} is a Git LFS pointer, not the graph: run 'git lfs pull'"
                )
        model = onnx.load(path, load_external_data=False)
        size = path.stat().st_size
    except OSError as error:
        raise QuantizeError(f"{path} cannot be read: {error.strerror}") from error
    except (DecodeError, ValueError) as error:
        size = path.stat().st_size
        raise QuantizeError(
            f"{path} is not an ONNX graph, or cut short ({size:,} bytes): {error}"
        ) from error
    if not model.graph.node:
        raise QuantizeError(f"{path} holds no graph ({size:,} bytes)")
    return model


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
