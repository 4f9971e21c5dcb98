"""Copies a graph with all its weights, wherever they lie: piece by piece, in little memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto, numpy_helper

from . import MODEL_FILE
from .data_file import MIN_BYTES, DataFile, set_place
from .errors import QuantizeError
from .external_data import Place, external_places, is_external, place_of
from .graph_file import all_tensors, load_graph

_PIECE = 1 << 23
# Types whose values numpy_helper gives back as the bytes of `raw_data`.
_PLAIN_TYPES = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64}


def copy_graph(source: Path, folder: Path) -> None:
    """Writes the graph as `model.onnx` into `folder`, and its weights, those inside the protobuf
    too, as `model.onnx.data`."""
    model = load_graph(source)
    external_places(model, source.parent)  # nothing is copied of a graph that is not whole
    with DataFile(folder) as data:
        _move_weights(model, source.parent, data)
    (folder / MODEL_FILE).write_bytes(model.SerializeToString())


def _move_weights(model: onnx.ModelProto, folder: Path, data: DataFile) -> None:
    inside = [tensor for tensor in model.graph.initializer if not is_external(tensor)]
    copied: dict[Place, int] = {}  # tensors that share their bytes go on sharing them
    for tensor in filter(is_external, all_tensors(model)):
        place = place_of(tensor, folder)
        if place not in copied:
            copied[place], _ = data.write(_pieces(place))
        set_place(tensor, copied[place], place.length)
    for tensor in inside:
        if len(content := _bytes_of(tensor)) >= MIN_BYTES:
            set_place(tensor, *data.write([content]))


def _bytes_of(tensor: TensorProto) -> bytes:
    if tensor.HasField("raw_data") or tensor.data_type not in _PLAIN_TYPES:
        return bytes(tensor.raw_data)
    return numpy_helper.to_array(tensor).tobytes()


def _pieces(place: Place) -> Iterator[bytes]:
    with place.file.open("rb") as file:
        file.seek(place.offset)
        left = place.length
        while left:
            piece = file.read(min(_PIECE, left))
            if not piece:
                raise QuantizeError(f"{place.file} became shorter while it was read")
            yield piece
            left -= len(piece)
