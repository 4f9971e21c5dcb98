"""What this process may use of its machine: a container's share, not the host's size.

Reads the affinity mask and the cgroup's files, version 2 and version 1 (kernel.org, "Control Group
v2"; "CFS Bandwidth Control"), and what the kernel says of the CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
# OpenMP's (torch), its BLAS libraries', and that of Rust's pool (tokenizers, llguidance).
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"),
)
# Of the cgroup: limit, what is used, and in which file and line what of that are old files.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
# On which the choice of int8 kernels depends; the last two are Arm's.
_INT8_FEATURES = ("avx2", "avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")


def available_cpus(cgroup: Path = CGROUP) -> int:
    """CPUs in the affinity mask, and no more than the cgroup's quota rounded up; at least 1."""
    # Not every system has affinity masks (macOS).
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, math.ceil(min(allowed or 1, _cpu_quota(cgroup))))


def limit_threads(num_threads: int) -> None:
    """For libraries that would take a thread per CPU of the host, before they are imported. What
    the environment says already stands."""
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(num_threads))


def quiet_libraries() -> None:
    """For the whole process, before any of them is imported: no telemetry, no network for local
    files, no thread pool of the tokenizer that a fork would break."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # One process owns the metrics: no files for others, which would pile up.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    os.environ.pop("prometheus_multiproc_dir", None)


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that this process could still take: what the host has free, within the cgroup's
    limit."""
    return memory_reader(cgroup)()


def memory_reader(cgroup: Path = CGROUP) -> Callable[[], int]:
    """`available_memory`, to be asked again and again. Raises OSError or ValueError once a file of
    the cgroup that was there at first is not: the host's memory is not this process's to take."""
    versions = [files for files in _MEMORY_FILES if (cgroup / files[0]).is_file()]

    def read() -> int:
        free = psutil.virtual_memory().available
        for limit_file, used_file, stat_file, cache in versions:
            limit = (cgroup / limit_file).read_text().strip()
            if limit != "max":
                # Files read long ago count as used, but make room at once.
                used = int((cgroup / used_file).read_text())
                used -= _statistic(cgroup / stat_file, cache)
                free = min(free, max(0, int(limit) - used))
        return free

    return read


def cpu_features(cpuinfo: Path = CPUINFO) -> list[str]:
    """The instruction sets for int8 that this CPU has; none where the kernel does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    # "flags" on x86, "Features" on Arm; a line for each CPU, all alike.
    found = {f for line in lines if line.startswith(("flags", "Features")) for f in line.split()}
    return [feature for feature in _INT8_FEATURES if feature in found]


def _cpu_quota(cgroup: Path) -> float:
    """CPUs' worth of time that the cgroup may use; infinite without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us = _number(cgroup / "cpu/cpu.cfs_quota_us")
    period_us = _number(cgroup / "cpu/cpu.cfs_period_us")
    if not quota_us or not period_us or quota_us < 0:  # -1: no limit
        return math.inf
    return quota_us / period_us


def _statistic(path: Path, name: str) -> int:
    try:
        values = dict(line.split() for line in path.read_text().splitlines())
        return int(values.get(name, 0))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
