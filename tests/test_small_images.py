"""Dockerfile.slim, Dockerfile.arm64 and what they install, against the main image and the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from check_pins import FILES, check, find_other_pins
from packaging.requirements import Requirement
from resolution import ARM, ARM_GPU, X86, Unreachable, Unresolvable, Wheel, resolve

from .live import ROOT

SMALL = ("Dockerfile.slim", "Dockerfile.arm64")


def pins_of(name: str) -> dict[str, str]:
    """Package -> version, of the lines that pin one."""
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if re.match(r"[\w.-]+==", line))


def instructions_of(name: str, stage: str) -> list[str]:
    """What a stage says, one line each, without comments and the lines that open it."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.M).replace("\\\n", "")
    body = re.split(rf"^FROM .* AS {stage}\n", text, flags=re.M)[1].split("\nFROM ", 1)[0]
    return [re.sub(r" +", " ", line) for line in body.splitlines() if line]


def resolved(name: str, platform: str, *options: str) -> list[Wheel]:
    try:
        return resolve(ROOT / name, platform, *options)
    except Unreachable as error:
        pytest.skip(f"no package index: {error}")


@pytest.mark.parametrize("file", SMALL)
@pytest.mark.parametrize("stage", ["runtime", "code"])
def test_small_image_is_run_as_the_main_one_is(file: str, stage: str) -> None:
    own = [line for line in instructions_of(file, stage) if line != "ARG BASE"]
    same = instructions_of("Dockerfile", stage)
    # The base's own, in the main image; the name of the base.
    said = [line.replace("${BASE}", "${BASE_RUNTIME}") for line in own]
    said = [re.sub(r"NVIDIA_\w+=\S+ ", "", line) for line in said]
    assert said == [line for line in same if line != "ARG BASE_RUNTIME"]


def test_slim_list_has_the_versions_of_the_other_lists() -> None:
    slim = pins_of("requirements-slim.txt")
    others = pins_of("requirements.txt") | pins_of("requirements-gpu.txt")
    assert {name: slim.get(name) for name in others} == others


def test_slim_list_has_the_torch_of_the_main_base_and_not_what_it_can_do_without() -> None:
    slim = pins_of("requirements-slim.txt")
    [base] = re.findall(r"^ARG BASE_RUNTIME=pytorch/pytorch:([\d.]+)-", read("Dockerfile"), re.M)
    assert slim["torch"] == base
    assert not {"triton", "nvidia-cusolver-cu12", "onnxruntime"} & slim.keys()


@pytest.mark.parametrize("name", ["slim", "arm64", "grace"])
def test_torch_is_one_that_the_server_takes(name: str) -> None:
    [line] = re.findall(r"^torch>=.*$", read("requirements.txt"), re.M)
    assert Requirement(line).specifier.contains(pins_of(f"requirements-{name}.txt")["torch"])


@pytest.mark.parametrize("file", SMALL)
def test_lists_are_resolved_for_the_python_of_the_base(file: str) -> None:
    assert "ARG BASE=python:3.11-slim-bookworm\n" in read(file)


def test_arm64_image_is_wheels_alone_and_brings_no_cuda() -> None:
    wheels = resolved("requirements-arm64.txt", ARM)
    packages = {wheel.package for wheel in wheels}
    assert {"onnxruntime", "torch", "llguidance"} <= packages
    assert not [name for name in packages if re.match("nvidia|cuda|triton", name)]
    assert all(wheel.file.endswith(("aarch64.whl", "none-any.whl")) for wheel in wheels)


def test_model_can_be_built_on_arm() -> None:
    assert len(resolved("requirements-build.txt", ARM, "--no-deps")) == 6


def test_grace_gets_an_onnxruntime_for_its_gpu() -> None:
    files = {wheel.package: wheel.file for wheel in resolved("requirements-grace.txt", ARM_GPU)}
    assert files["onnxruntime-gpu"].endswith("aarch64.whl")
    assert "onnxruntime" not in files and "nvidia-cublas" in files


def test_gpu_list_is_not_for_arm() -> None:
    with pytest.raises(Unresolvable, match="onnxruntime-gpu"):
        resolved("requirements-gpu.txt", ARM)


def test_version_that_does_not_exist_is_told(tmp_path: Path) -> None:
    file = tmp_path / "pins.txt"
    file.write_text("onnxruntime==1.26.999\n")
    try:
        assert "1.26.999" in str(check(file, X86, "--no-deps"))
    except Unreachable as error:
        pytest.skip(f"no package index: {error}")


def test_every_list_is_checked() -> None:
    names = {file.name for file in ROOT.glob("requirements*.txt")}
    assert names - {"requirements.txt"} == set(FILES)


def test_pins_outside_of_the_lists_are_found(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile.other").write_text("RUN pip install uv==0.1.2 \\\n 'torch==2.6.0'\n")
    (tmp_path / "Makefile").write_text("TORCH ?= torch==2.6.0\n")
    found = find_other_pins(tmp_path)
    assert found == {
        "torch==2.6.0": ["Dockerfile.other", "Makefile"],
        "uv==0.1.2": ["Dockerfile.other"],
    }


def read(name: str) -> str:
    return (ROOT / name).read_text()
