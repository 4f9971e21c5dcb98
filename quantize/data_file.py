"""Writes `model.onnx.data`, tensor by tensor, and tells each tensor where it lies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onnx import TensorProto

from . import MODEL_FILE

DATA_FILE = f"{MODEL_FILE}.data"
MIN_BYTES = 1024  # smaller tensors stay in the graph: ONNX Runtime reads shapes before any file
_ALIGNMENT = 4096  # a memory page: ONNX Runtime maps the file
_VALUES = ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data")


class DataFile:
    """The data file of a graph in `folder`, while it is written. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / DATA_FILE

    def __enter__(self) -> DataFile:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, pieces: Iterable[Any]) -> tuple[int, int]:
        """Bytes that belong together, at a page's start; their offset and length."""
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        offset = self._file.tell()
        for piece in pieces:
            self._file.write(piece)
        return offset, self._file.tell() - offset


def set_place(tensor: TensorProto, offset: int, length: int) -> None:
    """Makes `tensor` lie in the data file, and nowhere else."""
    for field in _VALUES:
        tensor.ClearField(field)
    del tensor.external_data[:]
    for key, value in (("location", DATA_FILE), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    tensor.data_location = TensorProto.EXTERNAL
