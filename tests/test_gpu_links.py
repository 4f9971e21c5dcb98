"""scripts/check_gpu_links.py: what is missing is told. The real wheels are its own business."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
from check_gpu_links import read_cuda_pins, read_pins
from elf import Library, read_library
from linker import Linker, check, newest_versions

from .programs import needs


def library(name: str, needed: str = "", undefined: str = "", defined: str = "") -> Library:
    """Words; a symbol's version comes behind @."""

    def symbols(words: str) -> set[tuple[str, str]]:
        return {(word.split("@")[0], (word + "@").split("@")[1]) for word in words.split()}

    return Library(Path(name), name, needed.split(), symbols(undefined), symbols(defined))


def checked(*libraries: Library) -> dict[str, object]:
    """Of the first one, among the others."""
    return check(libraries[0], Linker({each.soname: each for each in libraries}, {}))


PROVIDER = library("libprovider.so", "libcublas.so.12", "cublasCreate@libcublas.so.12")


def test_symbol_of_the_right_version_resolves() -> None:
    found = checked(PROVIDER, library("libcublas.so.12", defined="cublasCreate@libcublas.so.12"))
    assert (found["missing"], found["unresolved"]) == ([], [])
    assert found["brings"] == ["libcublas.so.12"]


def test_symbol_of_another_version_does_not() -> None:
    found = checked(PROVIDER, library("libcublas.so.12", defined="cublasCreate@libcublas.so.13"))
    assert found["unresolved"] == ["cublasCreate@libcublas.so.12"]


def test_missing_library_is_named_with_its_symbols() -> None:
    found = checked(PROVIDER)
    assert found["missing"] == ["libcublas.so.12"]
    assert found["unresolved"] == ["cublasCreate@libcublas.so.12"]


def test_what_a_needed_library_needs_counts_too() -> None:
    found = checked(
        library("a", "b", "deep"), library("b", "c"), library("c", "gone", defined="deep")
    )
    assert (found["missing"], found["unresolved"]) == (["gone"], [])


def test_driver_may_be_missing() -> None:
    found = checked(library("a", "libcuda.so.1", "cuInit"))
    assert (found["missing"], found["driver"], found["unresolved"]) == ([], ["libcuda.so.1"], [])


def test_newest_version_is_told_by_number() -> None:
    libraries = [library("a", undefined="x@GLIBC_2.9"), library("b", undefined="y@GLIBC_2.27")]
    assert newest_versions(libraries) == {"GLIBC": "2.27"}


def test_real_library_is_read() -> None:
    needs("readelf")
    folder = Path(onnxruntime.__file__).parent / "capi"
    found = read_library(folder / "libonnxruntime_providers_shared.so")
    assert found.soname == "libonnxruntime_providers_shared.so"
    assert "libc.so.6" in found.needed
    assert "Provider_GetHost" in {name for name, _ in found.defined}


def test_torch_says_which_libraries_it_wants(tmp_path: Path) -> None:
    (tmp_path / "torch-2.6.0.dist-info").mkdir()
    (tmp_path / "torch-2.6.0.dist-info" / "METADATA").write_text(
        "Requires-Dist: filelock\n"
        'Requires-Dist: nvidia-cublas-cu12 (==12.4.5.8) ; platform_system == "Linux"\n'
        'Requires-Dist: nvidia-nccl-cu12==2.21.5; platform_system == "Linux"\n'
    )
    assert read_cuda_pins(tmp_path) == ["nvidia-cublas-cu12==12.4.5.8", "nvidia-nccl-cu12==2.21.5"]


def test_torch_and_the_runtime_are_pinned() -> None:
    assert [pin.split("==")[0] for pin in read_pins()] == ["onnxruntime-gpu", "torch"]
