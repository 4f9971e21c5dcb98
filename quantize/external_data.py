"""Where a graph's tensors lie outside of its protobuf, and whether those files are whole.

Names of data files differ from tool to tool, so none is guessed; no weight is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import onnx
from onnx import TensorProto, helper

from .errors import QuantizeError
from .graph_file import all_tensors

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

    @property
    def problem(self) -> str | None:
        if self.stated_bytes in (None, self.num_bytes):
            return None
        return (
            f"{self.name} needs {self.num_bytes:,} bytes by its shape, and {self.stated_bytes:,} "
            f"are stated for it in {self.location}"
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes lie, in a file that has them all."""

    file: Path
    offset: int
    length: int


def is_external(tensor: TensorProto) -> bool:
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def external_tensors(model: onnx.ModelProto) -> list[ExternalTensor]:
    """Raises QuantizeError for an entry that cannot be read."""
    return [_external(tensor) for tensor in all_tensors(model) if is_external(tensor)]


def external_places(model: onnx.ModelProto, folder: Path) -> list[Place]:
    """Where the weights beside the graph lie. Raises QuantizeError if a file is not whole."""
    return [place_of(tensor, folder) for tensor in all_tensors(model) if is_external(tensor)]


def place_of(tensor: TensorProto, folder: Path) -> Place:
    """Raises QuantizeError if the file is not whole, or not in `folder`."""
    found = _external(tensor)
    problem = found.problem or file_problem(folder, found.location, found.end)
    if problem is not None:
        raise QuantizeError(f"{folder}: {problem}")
    return Place(folder / found.location, found.offset, found.num_bytes)


def file_problem(folder: Path, location: str, end: int) -> str | None:
    """What is wrong with the data file at `location`, which must have `end` bytes."""
    path = PurePosixPath(location)
    # By its name only: in a Hugging Face cache every file is a link to somewhere else.
    if path.is_absolute() or ".." in path.parts:
        return f"data file {location} lies outside of the folder"
    file = folder / path
    if not file.is_file():
        return (
            f"data file {location} is missing: it must lie beside the graph, under the name that "
            "the graph knows it by"
        )
    if (size := file.stat().st_size) < end:
        return f"data file {location} is cut short: it has {size:,} bytes, the graph needs {end:,}"
    return None


def _external(tensor: TensorProto) -> ExternalTensor:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = tensor.name or "a tensor without a name"
    if not entries.get("location"):
        raise QuantizeError(f"{name} lies outside of the graph, but no file is named for it")
    try:
        offset = int(entries.get("offset", 0))
        stated = int(entries["length"]) if "length" in entries else None
        num_bytes = _num_bytes(tensor)
    except (ValueError, KeyError) as error:
        raise QuantizeError(f"{name} in {entries['location']} cannot be read: {error}") from error
    if offset < 0 or (stated or 0) < 0:
        raise QuantizeError(f"{name} in {entries['location']} has a negative offset or length")
    return ExternalTensor(name, entries["location"], offset, num_bytes, stated)


def _num_bytes(tensor: TensorProto) -> int:
    bits = _BITS.get(tensor.data_type)
    if bits is None:
        bits = 8 * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    num_elements: int = math.prod(tensor.dims)
    return (num_elements * bits + 7) // 8
