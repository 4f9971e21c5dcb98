"""What a session on CUDA is opened with, the stream that it shares with torch, and its memory.

Knows nothing of graphs and runs. Nothing here has run on a GPU yet (docs/gpu.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import io
from pathlib import Path

import onnxruntime as ort
import torch

PROVIDER = "CUDAExecutionProvider"


def find_problem() -> str | None:
    """Why torch, which holds the cache, can use no GPU here; None if it can."""
    if torch.version.cuda is None:
        return "this torch is built for the CPU; install requirements-gpu.txt"
    if not torch.cuda.is_available():
        return "torch finds no GPU, or no driver for it"
    return None


def open_stream() -> int:
    """Makes a stream, torch's current one in this thread from now on; its handle.

    Not the default stream: its handle is 0, which ONNX Runtime takes for none, and then it makes a
    stream of its own (onnxruntime#19619).
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.set_stream(stream)
    return int(stream.cuda_stream)


def provider_options(stream: int, max_bytes: int = 0) -> dict[str, str]:
    """Of the CUDA provider, on the stream with this handle; `max_bytes` of 0 is no limit.

    Raises ValueError for the default stream.
    """
    if stream == 0:
        raise ValueError("ONNX Runtime does not take the default stream for the user's")
    options = {
        "device_id": "0",  # CUDA_VISIBLE_DEVICES says which one that is
        # What torch has queued (moved rows, uploads) then comes before a run, what it queues next
        # (sampling) behind it, and nobody waits between them.
        "user_compute_stream": str(stream),
        # By default the arena doubles with each request for more, and keeps that.
        "arena_extend_strategy": "kSameAsRequested",
        # Who chooses an fp32 graph wants 24 bits of mantissa, not TF32's 11.
        "use_tf32": "0",
    }
    if max_bytes:
        options["gpu_mem_limit"] = str(max_bytes)
    return options


def prepare(options: ort.SessionOptions) -> None:
    """What else a session on CUDA wants to be opened with."""
    # Weights in the arena would lie among the workspace, and hold regions that could be given back.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    # A pattern is kept for each combination of the inputs' shapes, and the mask's width grows with
    # every step: they would pile up.
    options.enable_mem_pattern = False


def load_libraries() -> None:
    """CUDA's and cuDNN's, from torch's and NVIDIA's wheels, where the loader does not look."""
    with contextlib.redirect_stdout(io.StringIO()):  # what is missing is told by find_unloadable
        ort.preload_dlls()


def find_unloadable() -> str | None:
    """What the loader says of ONNX Runtime's CUDA library, which names the one that is missing."""
    folder = Path(ort.__file__).parent / "capi"
    try:
        # The second one's symbols are in the first.
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return None


class DeviceMemory:
    """How much of the GPU's memory this process could still take, within its limit.

    Make it before anything is loaded: what is missing later counts as taken by this process.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._free_at_start = free_bytes()

    def free(self) -> int:
        return usable_bytes(free_bytes(), self._free_at_start, self._max_bytes)


def free_bytes() -> int:
    """What the driver has, and what torch holds without using it: the driver takes that for used
    (kekzl/imp#507)."""
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0]) + int(idle)


def usable_bytes(free: int, free_at_start: int, max_bytes: int) -> int:
    """Of `free` bytes, as many as `max_bytes` leaves (0: no limit) to a process that began when
    `free_at_start` were."""
    if not max_bytes:
        return free
    taken = max(0, free_at_start - free)
    return max(0, min(free, max_bytes - taken))
