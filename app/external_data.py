"""Where a graph's tensors lie outside of its protobuf, and whether those files are whole.

Names of data files differ from tool to tool, so none is guessed; no weight is read, so a missing
file is told at once and by its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import onnx

_EXTERNAL = onnx.TensorProto.EXTERNAL
# Bits of the types of which several elements lie in a byte, by name: older onnx lacks some.
_PACKED = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}


def find_data_problems(model: onnx.ModelProto, folder: Path) -> list[str]:
    """What is wrong with the data files of a graph that lies in `folder`; empty if all is well."""
    ends: dict[str, int] = {}  # location -> bytes that its file must have
    problems: list[str] = []
    for tensor in _tensors(model):
        if tensor.data_location != _EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        try:
            offset = int(entries.get("offset") or 0)
            length = int(entries["length"]) if entries.get("length") else _num_bytes(tensor)
        except ValueError:
            problems.append(f"tensor {tensor.name!r}: its offset or length is not a number")
            continue
        except KeyError:
            problems.append(f"tensor {tensor.name!r} is of an unknown type ({tensor.data_type})")
            continue
        if offset < 0 or length < 0:
            problems.append(f"tensor {tensor.name!r}: its offset or length is negative")
            continue
        ends[location] = max(ends.get(location, 0), offset + length)
    return problems + [
        problem
        for location, end in sorted(ends.items())
        if (problem := _file_problem(folder, location, end)) is not None
    ]


def _file_problem(folder: Path, location: str, end: int) -> str | None:
    path = PurePosixPath(location)
    # By its name only: in a Hugging Face cache every file is a link to somewhere else.
    if not location or path.is_absolute() or ".." in path.parts:
        return f"data file {location or 'without a name'} lies outside of the folder"
    file = folder / path
    if not file.is_file():
        return (
            f"data file {location} is missing: it must lie beside the graph, under the name that "
            "the graph knows it by"
        )
    if (size := file.stat().st_size) < end:
        return f"data file {location} is cut short: it has {size:,} bytes, the graph needs {end:,}"
    return None


def _num_bytes(tensor: onnx.TensorProto) -> int:
    """Of a tensor that does not tell its length; KeyError for a type that onnx does not know."""
    names = {number: name for name, number in onnx.TensorProto.DataType.items()}
    name = names[tensor.data_type]
    bits = _PACKED.get(name)
    if bits is None:
        bits = 8 * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    return (int(math.prod(tensor.dims)) * bits + 7) // 8


def _tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """Every tensor: of initializers, sparse ones, node attributes, subgraphs and functions."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None or field.name == "value_info":
            continue
        for child in [value] if hasattr(value, "ListFields") else value:  # one, or several
            yield from _tensors(child)
