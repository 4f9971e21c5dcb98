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

from .errors import QuantizeError
from .forms import Form

_FP32 = 4
# Bytes per parameter in the folder that is published; its embedding may stay fp32. An fp32 graph is
# moved there, not copied.
_PUBLISHED = {"fp32": 0.0, "fp16": 2.0, "int8": 1.25, "int8-dynamic": 1.25, "int4": 0.75}
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

    @property
    def num_graph_bytes(self) -> int:
        """The fp32 graph; a source that is a graph is copied as it is."""
        if not self.is_exported:
            return self.num_bytes
        return _FP32 * (self.num_parameters + self.num_embedded)

    def disk_bytes(self, precision: str) -> int:
        """At the fullest moment: the graph while it is exported, or beside the published one."""
        is_traced = self.is_exported and self.form == "portable"
        published = int(_PUBLISHED[precision] * self.num_parameters)
        if precision != "fp32":
            published += _FP32 * self.num_embedded
        # A traced graph is written twice, the second time in one file.
        beside = max(published, self.num_graph_bytes if is_traced else 0)
        converted = _FP32 * self.num_parameters if self.is_converted else 0
        return converted + self.num_graph_bytes + beside + _SLACK

    def memory_bytes(self) -> int:
        """Of the export, with the mapped pages of the source's files, which the system can drop."""
        if not self.is_exported:
            return _LIBRARIES + self.num_graph_bytes
        if self.form == "portable":  # torch holds the model, and tracing holds it twice
            return _LIBRARIES + 2 * self.num_graph_bytes
        # The files are mapped (mapped_weights.py). Beside them are what the builder joined, and the
        # largest matrix as it is converted and turned.
        exported = self.num_bytes + self.num_joined_bytes + 2 * _FP32 * self.num_embedded
        # From GGUF, the weights are read before they are put into the model.
        converted = 2 * self.num_bytes if self.is_converted else 0
        return _LIBRARIES + max(exported, converted)


def require_space(size: Size, precision: str, folder: Path) -> str:
    """One line on what is needed. Raises QuantizeError if the disk of `folder` has less."""
    needed = size.disk_bytes(precision)
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
