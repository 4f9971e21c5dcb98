"""The GPU's metrics, with a stub of NVML: absent where nobody can tell, never in a scrape's way.

There is no GPU here: nvidia-ml-py itself is used where it finds no driver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from app.gpu_driver import NOTHING, Driver, Reading, find_uuids, load_nvml
from app.gpu_metrics import GpuMetrics

UUID = "GPU-3fd0c9a6"
NAMES = ("gpu_utilization_ratio", "gpu_memory_used_bytes", "gpu_memory_free_bytes")


class StubNvml:
    """As much of pynvml as we use: three GPUs, of which torch may see one."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_NotFound(NVMLError):
        pass

    def __init__(self) -> None:
        self.problem: Exception | None = None  # of every call
        self.has_utilization = True
        self.utilizations = [75]  # the last one stays
        self.num_inits = self.num_shutdowns = 0

    def _check(self) -> None:
        if self.problem is not None:
            raise self.problem

    def nvmlInit(self) -> None:
        self.num_inits += 1
        self._check()

    def nvmlShutdown(self) -> None:
        self.num_shutdowns += 1
        self._check()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        self._check()
        known = {"GPU-0": 0, UUID: 1, "GPU-2": 2}
        if uuid not in known:
            raise self.NVMLError_NotFound("Not Found")
        return known[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._check()
        return SimpleNamespace(used=1000 * handle, free=24_000, total=25_000)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._check()
        if not self.has_utilization:
            raise self.NVMLError_NotSupported("Not Supported")
        gpu = self.utilizations.pop(0) if len(self.utilizations) > 1 else self.utilizations[0]
        return SimpleNamespace(gpu=gpu, memory=3)


def no_torch() -> tuple[int, int]:
    raise RuntimeError("CUDA error: unspecified launch failure")


@pytest.fixture
def nvml() -> StubNvml:
    return StubNvml()


def driver_of(
    nvml: StubNvml, ask_torch: Callable[[], tuple[int, int]] = no_torch, uuid: str = UUID
) -> Driver:
    return Driver(lambda: nvml, lambda: [uuid, f"MIG-{uuid}"], ask_torch)


def shown(registry: CollectorRegistry) -> dict[str, float]:
    values = {name: registry.get_sample_value(f"phi_serve_{name}") for name in NAMES}
    return {name: value for name, value in values.items() if value is not None}


def test_it_is_the_gpu_that_torch_sees_not_the_first_one(nvml: StubNvml) -> None:
    registry = CollectorRegistry()
    GpuMetrics(registry, driver_of(nvml).read).ask()
    assert shown(registry) == dict(zip(NAMES, (0.75, 1000, 24_000), strict=True))


def test_utilization_is_the_mean_of_the_last_ten_seconds(nvml: StubNvml) -> None:
    registry = CollectorRegistry()
    metrics = GpuMetrics(registry, driver_of(nvml).read)
    nvml.utilizations = [0, *[100] * 5, *[50] * 5]
    for _ in range(11):
        metrics.ask()
    assert shown(registry)["gpu_utilization_ratio"] == pytest.approx(0.75)


def test_before_anything_was_asked_there_are_names_but_no_samples() -> None:
    registry = CollectorRegistry()
    GpuMetrics(registry, lambda: NOTHING)
    assert shown(registry) == {}
    text = generate_latest(registry).decode()
    assert all(f"# TYPE phi_serve_{name} gauge\n" in text for name in NAMES)
    assert [line for line in text.splitlines() if not line.startswith("#")] == []


def test_library_that_is_missing_is_told_once_and_gives_no_metric(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """nvidia-ml-py's own words: there is no driver here."""
    registry = CollectorRegistry()
    try:
        load_nvml().nvmlInit()
    except Exception:
        driver = Driver(load_nvml, find_uuids, no_torch)
    else:
        pytest.skip("this machine has a driver")
    metrics = GpuMetrics(registry, driver.read)
    for _ in range(3):
        metrics.ask()
    assert shown(registry) == {}
    [message] = [record.getMessage() for record in caplog.records]
    assert "NVML" in message


def test_package_that_is_not_installed_gives_no_metric(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Any:
        raise ImportError("No module named 'pynvml'")

    assert Driver(load, lambda: [UUID], no_torch).read() == NOTHING
    assert "pynvml" in caplog.text


def test_where_nvml_cannot_start_torch_tells_of_the_memory(nvml: StubNvml) -> None:
    nvml.problem = nvml.NVMLError("Driver/library version mismatch")
    registry = CollectorRegistry()
    GpuMetrics(registry, driver_of(nvml, lambda: (4000, 10_000)).read).ask()
    assert shown(registry) == {"gpu_memory_used_bytes": 6000, "gpu_memory_free_bytes": 4000}


def test_part_of_a_gpu_has_memory_and_no_utilization(nvml: StubNvml) -> None:
    nvml.has_utilization = False
    assert driver_of(nvml).read() == Reading(None, 1000, 24_000)


def test_gpu_that_nvml_does_not_know_gives_no_metric_of_another(nvml: StubNvml) -> None:
    assert driver_of(nvml, uuid="GPU-elsewhere").read() == NOTHING
    assert nvml.num_shutdowns == 1


def test_gpu_that_is_lost_on_the_way_vanishes_and_comes_back(
    nvml: StubNvml, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    registry = CollectorRegistry()
    metrics = GpuMetrics(registry, driver_of(nvml).read)
    metrics.ask()
    assert nvml.num_inits == 1
    nvml.problem = nvml.NVMLError("GPU is lost")
    for _ in range(3):
        metrics.ask()
        assert shown(registry) == {}
    nvml.problem = None
    nvml.utilizations = [25]
    metrics.ask()
    assert shown(registry)["gpu_utilization_ratio"] == 0.25  # nothing of before the loss
    lost, back = [record.getMessage() for record in caplog.records]
    assert "GPU is lost" in lost
    assert "again" in back


def test_driver_that_hangs_holds_no_scrape_up_and_what_is_old_vanishes(nvml: StubNvml) -> None:
    clock, asked, hang = SimpleNamespace(now=100.0), threading.Event(), threading.Event()
    driver = driver_of(nvml)

    def read() -> Reading:
        if asked.is_set():
            hang.wait(60)
        reading = driver.read()
        asked.set()
        return reading

    registry = CollectorRegistry()
    metrics = GpuMetrics(registry, read, lambda: clock.now)
    metrics.watch()
    metrics.watch()
    try:
        assert asked.wait(60)
        give_up_at = time.monotonic() + 60
        while not shown(registry):  # the thread is between its reading and keeping it
            assert time.monotonic() < give_up_at
            time.sleep(0.001)
        clock.now += 10
        assert len(shown(registry)) == 3
        clock.now += 1
        assert shown(registry) == {}
        assert sum(thread.name == "gpu-metrics" for thread in threading.enumerate()) == 1
    finally:
        metrics.stop()
        hang.set()
