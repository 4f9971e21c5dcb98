"""How a session is fed and run on its device: on the CPU as it comes, on CUDA without waiting.

Knows tensors and bindings only; what they mean is the form's business (`form.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray

Mask = NDArray[np.int64] | torch.Tensor  # (rows, columns)

log = logging.getLogger(__name__)

# Below the bridge's self-test of an idle engine, so that memory is given back by it.
_REST_SECONDS = 20.0
# Their names in onnxruntime_run_options_config_keys.h.
_ARENAS = {"cuda": "gpu:0", "cpu": "cpu:0"}


class Runner:
    """On the CPU."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session

    def ones_below(self, ends: NDArray[np.int64], width: int) -> Mask:
        """`(rows, width)`: ones up to each row's end, `ends` (rows, 1), zeros behind it."""
        mask: NDArray[np.int64] = (np.arange(width) < ends).astype(np.int64)
        return mask

    def feed(self, binding: ort.IOBinding, name: str, values: Mask) -> None:
        """Binds an input of int64."""
        binding.bind_cpu_input(name, values)

    def run(self, binding: ort.IOBinding) -> None:
        self._session.run_with_iobinding(binding)


class CudaRunner(Runner):
    """On a session that shares torch's current stream (`cuda.open_stream`).

    Uploads, runs and whatever torch does with the logits follow each other on the device; nothing
    waits on the host until somebody reads a result. Memory of the arena and of torch that nobody
    uses is given back by the first run after a rest.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(session)
        self._device = device
        self._clock = clock
        self._ran_at = clock()
        self._unwaited = run_options(waits=False)
        self._shrinking: ort.RunOptions | None = run_options(shrinks=_ARENAS[device.type])
        self._fed: list[torch.Tensor] = []

    def ones_below(self, ends: NDArray[np.int64], width: int) -> Mask:
        # Made there: a wide mask takes longer to send than to make.
        columns = torch.arange(width, device=self._device)
        return (columns < self._send(ends)).long()

    def feed(self, binding: ort.IOBinding, name: str, values: Mask) -> None:
        tensor = values if isinstance(values, torch.Tensor) else self._send(values)
        place = (self._device.type, 0, np.int64, tuple(tensor.shape), tensor.data_ptr())
        binding.bind_input(name, *place)
        self._fed.append(tensor)  # a binding keeps no memory alive

    def run(self, binding: ort.IOBinding) -> None:
        now = self._clock()
        is_rested = now - self._ran_at >= _REST_SECONDS
        self._ran_at = now
        if not (is_rested and self._shrink(binding)):
            self._session.run_with_iobinding(binding, self._unwaited)
        # Freed memory may be used again at once: by torch, so on the same stream, behind the run.
        self._fed.clear()

    def _shrink(self, binding: ort.IOBinding) -> bool:
        """A run that frees what it can; False, without a run, if the arena is not known by the
        name that is documented."""
        if self._shrinking is None:
            return False
        try:
            self._session.run_with_iobinding(binding, self._shrinking)
        except Exception as error:
            if "shrink list" not in str(error):
                raise
            log.warning("memory is not given back after a rest: %s", error)
            self._shrinking = None
            return False
        torch.cuda.empty_cache()  # nothing, where CUDA is not in use
        return True

    def _send(self, values: NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type == "cuda":  # out of other memory a copy makes the host wait
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def run_options(*, waits: bool = True, shrinks: str = "") -> ort.RunOptions:
    """`waits`: until the stream is done. `shrinks`: the arenas whose unused memory is given back at
    the end of the run, as in "gpu:0"; to free device memory waits anyway."""
    options = ort.RunOptions()
    if not waits:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    if shrinks:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", shrinks)
    return options


def runner_of(session: ort.InferenceSession, device: torch.device) -> Runner:
    return CudaRunner(session, device) if device.type == "cuda" else Runner(session)
