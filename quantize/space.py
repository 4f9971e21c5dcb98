"""Disk and memory that a build needs, told and checked before it starts.

Estimates, on the large side: what the stages have on disk at the same time, from the number of
parameters.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from .errors import QuantizeError
from .forms import Dtype, Form
from .precision import Choice

_FP32 = 4
_GRAPH: dict[Dtype, int] = {"fp32": _FP32, "fp16": 2}  # bytes per parameter of an exported graph
# And of a quantized one, with its scales: of all parameters, and what the embedding adds, which
# stays in 8 bits. In int4 attention, a third of the matrices, and LM head do so, too.
_QUANTIZED = {"int8": (1.05, 1.0), "int8-dynamic": (1.05, 1.0), "int4": (0.82, 1.3)}
_LIBRARIES = 700_000_000  # of memory, torch's most of all
_SLACK = 64 << 20  # tokenizer, records, the graphs themselves


@dataclass(frozen=True, slots=True)
class Size:
    """What of a source decides how much room its build takes."""

    num_parameters: int
    num_embedded: int  # parameters of the embedding, stored twice if tied to the LM head
    num_bytes: int  # of the weights as they are
    num_joined_bytes: int = 0  # of those that the builder joins (queries, keys and values)
    is_converted: bool = False  # a copy of it is written in fp32 first
    form: Form = "fused"
    is_exported: bool = True  # not so for a source that is a graph already

    def graph_bytes(self, dtype: Dtype) -> int:
        """Of the graph before it is quantized; a source that is a graph is copied as it is."""
        if not self.is_exported:
            return self.num_bytes
        return _GRAPH[dtype] * (self.num_parameters + self.num_embedded)

    def disk_bytes(self, choice: Choice) -> int:
        """At the fullest moment: the graph while it is exported, or beside the quantized one."""
        graph = self.graph_bytes(choice.graph_dtype)
        beside = 0  # a graph that is not quantized is moved, not copied
        if choice.is_quantized:
            each, more = _QUANTIZED[choice.precision]
            beside = int(each * self.num_parameters + more * self.num_embedded)
        if self.is_exported and self.form == "portable":
            beside = max(beside, graph)  # traced, then written once more in one file
        converted = _FP32 * self.num_parameters if self.is_converted else 0
        return converted + graph + beside + _SLACK

    def memory_bytes(self) -> int:
        """Of the export, with the mapped pages of the source's files, which the system can drop."""
        if not self.is_exported:
            return _LIBRARIES + self.num_bytes
        if self.form == "portable":  # torch holds the model, and tracing holds it twice
            return _LIBRARIES + 2 * self.graph_bytes("fp32")
        # The files are mapped (mapped_weights.py). Beside them are what the builder joined, and the
        # largest matrix as it is converted and turned.
        exported = self.num_bytes + self.num_joined_bytes + 2 * _FP32 * self.num_embedded
        # From GGUF, the weights are read before they are put into the model.
        converted = 2 * self.num_bytes if self.is_converted else 0
        return _LIBRARIES + max(exported, converted)


def require_space(size: Size, choice: Choice, folder: Path) -> str:
    """One line on what is needed. Raises QuantizeError if the disk of `folder` has less."""
    needed = size.disk_bytes(choice)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise QuantizeError(
            f"about {in_units(needed)} of disk are needed while it is built, and {folder} has "
            f"{in_units(free)} free: give an --output on a larger disk"
        )
    return (
        f"{size.num_parameters / 1e6:,.0f} million parameters: needs up to {in_units(needed)} of "
        f"disk ({in_units(free)} free) and about {in_units(size.memory_bytes())} of memory"
    )


def available_memory() -> int:
    """Bytes that a new process could take without pushing others out."""
    return int(psutil.virtual_memory().available)


@contextmanager
def temporaries_in(folder: Path) -> Iterator[None]:
    """Libraries, too, put their temporary files into `folder`: on the disk that was checked, and
    removed with it."""
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder.resolve())
    try:
        yield
    finally:
        os.environ.pop("TMPDIR")
        if before[0] is not None:
            os.environ["TMPDIR"] = before[0]
        tempfile.tempdir = before[1]


def in_units(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"


def is_out_of_space(error: BaseException) -> bool:
    """Whether a full disk is behind it; C++ libraries say so in their text only."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno in codes:
        return True
    if "No space left on device" in str(error):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and is_out_of_space(cause)
