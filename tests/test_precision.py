"""Which precision suits which device, and what the server does where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.errors import WrongSetting
from app.precision import find_mismatch

from .conftest import TinyModel
from .edits import copy_of, make_fp16
from .engines import loaded_service

HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("device", "form", "kv", "logits", "says"),
    [
        ("cpu", "fused", FULL, FULL, None),
        ("cpu", "fused", HALF, HALF, "fp16"),
        ("cpu", "fused", HALF, FULL, "fp16"),
        ("cpu", "fused", FULL, HALF, "fp16"),
        ("cpu", "portable", HALF, HALF, "fp16"),
        ("cuda", "fused", HALF, HALF, None),
        ("cuda", "fused", HALF, FULL, None),
        ("cuda", "fused", FULL, FULL, "fp32"),
        ("cuda", "portable", FULL, FULL, None),  # plain attention runs there in fp32
    ],
)
def test_mismatch_is_told_with_the_precision(
    device: str, form: str, kv: torch.dtype, logits: torch.dtype, says: str | None
) -> None:
    found = find_mismatch(torch.device(device), form, kv, logits)
    assert found is None if says is None else found is not None and says in found


@pytest.fixture(scope="module")
def fp16_folder(tiny_llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_of(tiny_llama.folder, tmp_path_factory.mktemp("fp16"))
    make_fp16(folder)
    return folder


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_fp16_on_the_cpu_is_served_and_told(
    device: str, fp16_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = loaded_service(fp16_folder, "--device", device)
    assert service.bridge.failure is None
    assert service.current.loaded is not None
    info = service.current.loaded.info
    assert info["precision_mismatch"] is True
    [warning] = info["warnings"]
    assert "fp16" in warning
    assert warning in [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_fp16_on_the_cpu_is_refused_in_strict_mode(fp16_folder: Path) -> None:
    service = loaded_service(fp16_folder, "--strict-precision")
    assert isinstance(service.bridge.failure, WrongSetting)  # the process ends with 2
    assert "STRICT_PRECISION" in str(service.bridge.failure)


def test_fp32_on_the_cpu_is_served_in_strict_mode(tiny_llama: TinyModel) -> None:
    service = loaded_service(tiny_llama.folder, "--strict-precision")
    assert service.bridge.failure is None
    assert service.current.loaded is not None
    assert (
        service.current.loaded.info["precision_mismatch"],
        service.current.loaded.info["warnings"],
    ) == (
        False,
        [],
    )
