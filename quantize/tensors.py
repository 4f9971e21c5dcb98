"""A graph's weights, one at a time: read from their files, edited, written anew.

No stage holds more than one weight. Reading maps the file; what is noted by `edit` is applied when
a weight is read, so a chain of edits costs no copy of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

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
        self._transposed: dict[str, str] = {}  # name -> of the tensor that it is the transpose of
        self._folder = folder
        self._edits: dict[str, list[Edit]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._transposed

    def __iter__(self) -> Iterator[str]:
        return chain(self._tensors, self._transposed)

    def transposed(self, name: str) -> str:
        """The name of another weight, which is this one's transpose."""
        other = f"{name}/transposed"
        self._transposed[other] = name
        return other

    def shape(self, name: str) -> tuple[int, ...]:
        """As stored; edits keep it."""
        dims = tuple(self._tensor(name).dims)
        return dims[::-1] if name in self._transposed else dims

    def num_bytes(self, name: str) -> int:
        tensor = self._tensor(name)
        itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        return int(math.prod(tensor.dims) * itemsize)

    def is_float(self, name: str) -> bool:
        return self._tensor(name).data_type in (TensorProto.FLOAT, TensorProto.FLOAT16)

    def edit(self, name: str, edit: Edit) -> None:
        """`edit` takes the weight in fp32, after the edits noted before, and gives it back in the
        same shape."""
        self._edits.setdefault(name, []).append(edit)

    def is_edited(self, name: str) -> bool:
        return name in self._edits

    def stored(self, name: str) -> Array:
        """As in the file, without edits; a view of it if it lies outside the graph."""
        tensor = self._tensor(name)
        if is_external(tensor):
            array = read_outside(tensor, self._folder)
        else:
            array = numpy_helper.to_array(tensor)
        return array.T if name in self._transposed else array

    def _tensor(self, name: str) -> TensorProto:
        tensor: TensorProto = self._tensors[self._transposed.get(name, name)]
        return tensor

    def read(self, name: str) -> NDArray[np.float32]:
        """In fp32, with its edits."""
        array = np.asarray(self.stored(name), np.float32)
        for edit in self._edits.get(name, ()):
            array = edit(array)
        return array


def read_outside(tensor: TensorProto, folder: Path) -> Array:
    """A view of a tensor that lies in a file of `folder`."""
    place = place_of(tensor, folder)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    if 0 in shape:
        return np.empty(shape, dtype)
    mapped: Array = np.memmap(place.file, dtype, "r", place.offset, shape)
    return mapped


class WeightWriter:
    """Writes `model.onnx.data` in `folder`, weight by weight, and at the end `model.onnx`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = DataFile(folder)
        self._tensors: dict[str, TensorProto] = {}

    def __enter__(self) -> WeightWriter:
        self._data.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._data.__exit__()

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
        self.place(tensor, array)
        self._tensors[name] = tensor
        return name

    def place(self, tensor: TensorProto, array: Array) -> None:
        """Writes `array` into the data file, and into `tensor` where it lies."""
        set_place(tensor, *self._data.write([np.ascontiguousarray(array).data]))

    def save(self, model: onnx.ModelProto) -> None:
        """Writes the graph of `model`, which has no weights of its own, with those added so far."""
        model.graph.initializer.extend(self._tensors.values())
        # Shapes noted for values may be stale; ONNX Runtime infers them anew.
        del model.graph.value_info[:]
        (self._folder / MODEL_FILE).write_bytes(model.SerializeToString())
