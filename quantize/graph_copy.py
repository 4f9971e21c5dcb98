"""The weights of an ONNX graph that lie in other files: which they are, and taking them along.

Locations are read off the protobuf, in initializers and in attributes alike; a data file may have
any name. Weights are copied piece by piece: a graph of any size needs little memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from . import MODEL_FILE
from .errors import QuantizeError

_ALIGNMENT = 4096  # a memory page: ONNX Runtime maps the file
_MIN_BYTES = 1024  # smaller tensors stay in the graph: ONNX Runtime reads shapes before any file
_PIECE = 1 << 23
# Types whose values numpy_helper gives back as the bytes of `raw_data`.
_PLAIN_TYPES = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes lie."""

    file: Path
    offset: int
    length: int


def load_graph(path: Path) -> onnx.ModelProto:
    """The protobuf alone, without the weights beside it."""
    try:
        return onnx.load(path, load_external_data=False)
    except (DecodeError, OSError) as error:
        raise QuantizeError(f"{path} is not a whole ONNX file: {error}") from error


def tensors_of(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Every tensor: initializers and attributes, in subgraphs and functions too."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_attributes(function.attribute_proto)
        yield from _of_nodes(function.node)


def _of_graph(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        yield from _of_attributes(node.attribute)


def _of_attributes(attributes: Iterable[onnx.AttributeProto]) -> Iterator[TensorProto]:
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        if attribute.HasField("g"):
            yield from _of_graph(attribute.g)
        for graph in attribute.graphs:
            yield from _of_graph(graph)


def place_of(tensor: TensorProto, folder: Path) -> Place:
    """Raises QuantizeError if the file is missing or too short, or lies outside `folder`."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = PurePosixPath(entries.get("location", ""))
    if not location.parts or location.is_absolute() or ".." in location.parts:
        raise QuantizeError(f"tensor {tensor.name!r} lies at {str(location)!r}, outside its folder")
    file = folder / location
    if not file.is_file():
        raise QuantizeError(f"{file} is missing: the graph keeps weights in it")
    size = file.stat().st_size
    offset = int(entries.get("offset", 0))
    length = int(entries.get("length", size - offset))
    if offset < 0 or length < 0 or offset + length > size:
        raise QuantizeError(
            f"{file} is cut off: it has {size:,} bytes, and tensor {tensor.name!r} ends at "
            f"{offset + length:,}"
        )
    return Place(file, offset, length)


def external_places(model: onnx.ModelProto, folder: Path) -> list[Place]:
    """Where the weights beside the graph lie. Raises QuantizeError if a file is not whole."""
    return [place_of(tensor, folder) for tensor in tensors_of(model) if uses_external_data(tensor)]


def copy_graph(source: Path, folder: Path, *, keep_names: bool = False) -> None:
    """Copies a graph with all its weights into `folder`.

    With `keep_names` under the names that it has; otherwise as `model.onnx` with `model.onnx.data`,
    where weights inside the protobuf go too.
    """
    model = load_graph(source)
    if keep_names:
        for file in {place.file for place in external_places(model, source.parent)}:
            target = folder / file.relative_to(source.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        shutil.copyfile(source, folder / source.name)
        return
    external_places(model, source.parent)  # nothing is copied of a graph that is not whole
    with (folder / f"{MODEL_FILE}.data").open("wb") as data:
        _move_weights(model, source.parent, data)
    (folder / MODEL_FILE).write_bytes(model.SerializeToString())


def _move_weights(model: onnx.ModelProto, folder: Path, data: BinaryIO) -> None:
    copied: dict[Place, int] = {}  # tensors that share their bytes go on sharing them
    for tensor in tensors_of(model):
        if not uses_external_data(tensor):
            continue
        place = place_of(tensor, folder)
        if place not in copied:
            copied[place] = _align(data)
            _copy_piecewise(place, data)
        _set_place(tensor, copied[place], place.length)
    for tensor in model.graph.initializer:
        if not uses_external_data(tensor) and len(content := _bytes_of(tensor)) >= _MIN_BYTES:
            offset = _align(data)
            data.write(content)
            _set_place(tensor, offset, len(content))


def _bytes_of(tensor: TensorProto) -> bytes:
    if tensor.HasField("raw_data") or tensor.data_type not in _PLAIN_TYPES:
        return bytes(tensor.raw_data)
    return numpy_helper.to_array(tensor).tobytes()


def _align(data: BinaryIO) -> int:
    data.write(bytes(-data.tell() % _ALIGNMENT))
    return data.tell()


def _copy_piecewise(place: Place, data: BinaryIO) -> None:
    with place.file.open("rb") as file:
        file.seek(place.offset)
        left = place.length
        while left:
            piece = file.read(min(_PIECE, left))
            if not piece:
                raise QuantizeError(f"{place.file} became shorter while it was read")
            data.write(piece)
            left -= len(piece)


def _set_place(tensor: TensorProto, offset: int, length: int) -> None:
    for field in ("raw_data", "float_data", "double_data", "int32_data", "int64_data"):
        tensor.ClearField(field)
    del tensor.external_data[:]
    for key, value in (("location", f"{MODEL_FILE}.data"), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    tensor.data_location = TensorProto.EXTERNAL
