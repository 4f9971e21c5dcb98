"""What the GPU's driver tells of the GPU that torch uses: NVML, through nvidia-ml-py.

A container may lack the driver's library, and a GPU may fall off its bus while we run. Then memory
is what torch tells, as long as that can. Calls may block: they are for a thread of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

log = logging.getLogger(__name__)


class Reading(NamedTuple):
    """None: nobody can tell."""

    utilization: float | None  # 0 to 1: share of the last moment in which a kernel ran
    used_bytes: int | None  # by all processes
    free_bytes: int | None


NOTHING = Reading(None, None, None)


def load_nvml() -> Any:
    """Raises ImportError where nvidia-ml-py is not installed."""
    import pynvml

    return pynvml


def find_uuids() -> list[str]:
    """By which NVML may know torch's first GPU; it numbers GPUs without CUDA_VISIBLE_DEVICES."""
    import torch

    uuid = torch.cuda.get_device_properties(0).uuid
    return [f"GPU-{uuid}", f"MIG-{uuid}"]


def ask_torch() -> tuple[int, int]:
    """Bytes that are free, and all."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return int(free), int(total)


class Driver:
    """Keeps NVML open from one reading to the next; after an error it is opened anew."""

    def __init__(
        self,
        load_nvml: Callable[[], Any] = load_nvml,
        find_uuids: Callable[[], list[str]] = find_uuids,
        ask_torch: Callable[[], tuple[int, int]] = ask_torch,
    ) -> None:
        self._load_nvml = load_nvml
        self._find_uuids = find_uuids
        self._ask_torch = ask_torch
        self._nvml: Any = None
        self._handle: Any = None
        self._problem: str | None = None  # as the log has been told

    def read(self) -> Reading:
        """Never raises."""
        try:
            reading = self._read_nvml()
        except Exception as error:  # NVML's own, ImportError, OSError: all the same here
            self._close()
            self._tell(f"{type(error).__name__}: {error}")
            return self._read_torch()
        self._tell(None)
        return reading

    def _read_nvml(self) -> Reading:
        if self._handle is None:
            self._open()
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        try:
            utilization = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except self._nvml.NVMLError_NotSupported:  # a part of a GPU (MIG) has none
            utilization = None
        return Reading(utilization, int(memory.used), int(memory.free))

    def _open(self) -> None:
        nvml = self._load_nvml()
        nvml.nvmlInit()
        self._nvml = nvml
        for uuid in (uuids := self._find_uuids()):
            with suppress(nvml.NVMLError_NotFound):
                self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                return
        raise LookupError(f"NVML knows no {' and no '.join(uuids)}")

    def _close(self) -> None:
        nvml, self._nvml, self._handle = self._nvml, None, None
        if nvml is not None:
            with suppress(Exception):
                nvml.nvmlShutdown()

    def _read_torch(self) -> Reading:
        try:
            free, total = self._ask_torch()
        except Exception:
            return NOTHING
        return Reading(None, total - free, free)

    def _tell(self, problem: str | None) -> None:
        """Of a change, not of each reading."""
        if problem == self._problem:
            return
        self._problem = problem
        if problem is None:
            log.info("NVML tells of the GPU again")
        else:
            log.warning("no gpu_utilization_ratio: NVML tells nothing of the GPU: %s", problem)
