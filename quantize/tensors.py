"""A graph's weights, one at a time: read from their files, edited, written anew.

No stage holds more than one weight. Reading maps the file; what is noted by `edit` is applied when
a weight is read, so a chain of edits costs no copy of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from . import MODEL_FILE
from .data_file import MIN_BYTES, DataFile, set_place
from .external_data import is_external, place_of

Array = NDArray[np.generic]
Edit = Callable[[NDArray[np.float32]], NDArray[np.float32]]


class Weights:
    """The initializers of `model`, whose data files lie in `folder`."""

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._folder = folder
        self._edits: dict[str, list[Edit]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """As stored; edits keep it."""
        return tuple(self._tensors[name].dims)

    def num_bytes(self, name: str) -> int:
        tensor = self._tensors[name]
        itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        return int(math.prod(tensor.dims) * itemsize)

    def is_float(self, name: str) -> bool:
        return self._tensors[name].data_type in (TensorProto.FLOAT, TensorProto.FLOAT16)

    def edit(self, name: str, edit: Edit) -> None:
        """`edit` takes the weight in fp32, after the edits noted before, and gives it back in the
        same shape."""
        self._edits.setdefault(name, []).append(edit)

    def is_edited(self, name: str) -> bool:
        return name in self._edits

    def stored(self, name: str) -> Array:
        """As in the file, without edits; a view of it if it lies outside the graph."""
        tensor = self._tensors[name]
        if not is_external(tensor):
            return numpy_helper.to_array(tensor)
        place = place_of(tensor, self._folder)
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        shape = tuple(tensor.dims)
        if 0 in shape:
            return np.empty(shape, dtype)
        mapped: Array = np.memmap(place.file, dtype, "r", place.offset, shape)
        return mapped

    def read(self, name: str) -> NDArray[np.float32]:
        """In fp32, with its edits."""
        array = np.asarray(self.stored(name), np.float32)
        for edit in self._edits.get(name, ()):
            array = edit(array)
        return array


class WeightWriter:
    """Writes `model.onnx.data` in `folder`, weight by weight, and at the end `model.onnx`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = DataFile(folder)
        self._tensors: dict[str, TensorProto] = {}

    def __enter__(self) -> WeightWriter:
        self._data.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._data.__exit__(kind, error, traceback)

    def add(self, name: str, array: Array) -> str:
        """Writes a weight; a name that has been written already is left as it is. The name."""
        if name in self._tensors:
            return name
        array = np.ascontiguousarray(array)
        if array.nbytes < MIN_BYTES:
            self._tensors[name] = numpy_helper.from_array(array, name)
            return name
        tensor = TensorProto(name=name, dims=array.shape)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        set_place(tensor, *self._data.write([array.data]))
        self._tensors[name] = tensor
        return name

    def save(self, model: onnx.ModelProto) -> None:
        """Writes the graph of `model` with the weights added so far in place of its own."""
        del model.graph.initializer[:]
        model.graph.initializer.extend(self._tensors.values())
        # Shapes noted for values may be stale; ONNX Runtime infers them anew.
        del model.graph.value_info[:]
        (self._folder / MODEL_FILE).write_bytes(model.SerializeToString())
