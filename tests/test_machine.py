"""A container's share, from faked cgroup files."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from app.machine import (
    available_cpus,
    available_memory,
    cpu_features,
    limit_threads,
    memory_reader,
)


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(
    ("cpu_max", "cpus"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("max 100000", 8),
        ("3200000 100000", 8),
        ("broken", 8),
    ],
)
def test_cpus_are_the_quota_rounded_up_within_the_mask(
    cpu_max: str, cpus: int, tmp_path: Path
) -> None:
    assert available_cpus(write(tmp_path, cpu_dot_max=cpu_max)) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("300000", 3), ("-1", 8)])
def test_quota_of_the_old_cgroups_is_read(quota: str, cpus: int, tmp_path: Path) -> None:
    write(tmp_path, cpu__cpu_dot_cfs_quota_us=quota, cpu__cpu_dot_cfs_period_us="100000")
    assert available_cpus(tmp_path) == cpus


def test_without_cgroup_the_mask_decides(tmp_path: Path) -> None:
    assert available_cpus(tmp_path) == 8


def test_without_masks_all_cpus_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cpus(tmp_path) == 6


def test_memory_is_what_the_limit_leaves(tmp_path: Path) -> None:
    write(tmp_path, memory_dot_max="5000000", memory_dot_current="2000000")
    assert available_memory(tmp_path) == 3000000


def test_memory_limit_of_the_old_cgroups_is_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        memory__memory_dot_limit_in_bytes="5000000",
        memory__memory_dot_usage_in_bytes="4000000",
    )
    assert available_memory(tmp_path) == 1000000


@pytest.mark.parametrize(
    ("root", "cache"), [("", "inactive_file"), ("memory__", "total_inactive_file")]
)
def test_reclaimable_file_cache_is_not_used_memory(root: str, cache: str, tmp_path: Path) -> None:
    limit, used = ("memory_dot_max", "memory_dot_current")
    if root:
        limit, used = ("memory_dot_limit_in_bytes", "memory_dot_usage_in_bytes")
    files = {limit: "5000000", used: "4000000", "memory_dot_stat": f"anon 5\n{cache} 2500000\n"}
    write(tmp_path, **{root + name: text for name, text in files.items()})
    assert available_memory(tmp_path) == 3500000


@pytest.mark.parametrize("limit", ["max", "99999999999999999"])
def test_memory_without_a_real_limit_is_the_hosts(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = psutil.virtual_memory()._replace(available=7000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    write(tmp_path, memory_dot_max=limit, memory_dot_current="2000000")
    assert available_memory(tmp_path) == 7000


@pytest.mark.parametrize("name", ["memory.max", "memory.current"])
def test_limit_that_cannot_be_read_any_more_is_not_the_hosts_memory(
    name: str, tmp_path: Path
) -> None:
    read = memory_reader(write(tmp_path, memory_dot_max="5000000", memory_dot_current="2000000"))
    assert read() == 3000000
    (tmp_path / name).unlink()
    with pytest.raises(OSError, match=name):
        read()


def test_limit_that_changes_is_heard(tmp_path: Path) -> None:
    read = memory_reader(write(tmp_path, memory_dot_max="max", memory_dot_current="2000000"))
    assert read() > 3000000
    write(tmp_path, memory_dot_max="5000000")
    assert read() == 3000000


@pytest.mark.parametrize(
    ("cpuinfo", "features"),
    [
        (
            "flags\t\t: fpu avx avx2 avx512_vnni amx_int8 amx_tile\n",
            ["avx2", "avx512_vnni", "amx_int8"],
        ),
        ("flags : fpu avx2\nbugs : avx_vnni\nflags : fpu avx2\n", ["avx2"]),
        ("Features\t: fp asimd asimddp i8mm\n", ["asimddp", "i8mm"]),
        ("flags : fpu sse2\n", []),
        (None, []),
    ],
)
def test_features_for_int8_are_read_off_cpuinfo(
    cpuinfo: str | None, features: list[str], tmp_path: Path
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert cpu_features(tmp_path / "cpuinfo") == features


def test_libraries_are_told_of_the_threads_unless_the_environment_says_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    limit_threads(3)
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["MKL_NUM_THREADS"] == os.environ["RAYON_NUM_THREADS"] == "3"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "3"
