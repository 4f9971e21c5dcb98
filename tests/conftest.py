"""Model folders that tests share. Built once a session, by the real exporter."""

from __future__ import annotations

import os

# As app/__main__ does, before any library reads them.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from quantize.build import build
from quantize.export import export_fused
from quantize.portable import export_portable
from quantize.precision import choose
from quantize.sources import resolve

from .live import ROOT, LiveServer
from .tiny import TorchReference, make_llama, make_phi3
from .tiny_families import FAMILIES, make_family


@dataclass(frozen=True)
class TinyModel:
    source: Path  # Hugging Face folder
    folder: Path  # what is served
    reference: TorchReference


# A tiny model gains nothing by a second thread; beside other processes, waiting for it takes long.
torch.set_num_threads(1)

DEFAULT_FOLDER = ROOT / "models" / "default"

Build = Callable[..., Path]
Bring = Callable[..., Path]
Named = Callable[[str], Path]


@pytest.fixture(autouse=True)
def torch_has_one_thread() -> Iterator[None]:
    """Again, behind a test that has loaded a model with more: a process that is forked from one
    whose torch has used several waits for ever for those that it has not got."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Exports an HF folder (or 'default') at a precision, as the command line does."""

    def make(source: Path, precision: str, device: str = "cpu") -> Path:
        root = tmp_path_factory.mktemp("model")
        folder = root / "folder"
        folder.mkdir()
        with resolve(str(source), root / "cache", root) as resolved:
            build(resolved, folder, choose(precision, device, allow_slow=True), gate=None)
        return folder

    return make


@pytest.fixture(scope="session")
def built(build_folder: Build) -> Build:
    """Likewise, once for each source and precision: to be read only."""
    return cache(build_folder)


@pytest.fixture(scope="session")
def family_source(tmp_path_factory: pytest.TempPathFactory) -> Named:
    """A Hugging Face folder of each of tiny_families, made once."""
    return cache(lambda name: make_family(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def family_graph(family_source: Named, tmp_path_factory: pytest.TempPathFactory) -> Named:
    """Its fp32 graph alone."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        export = export_fused if name in FAMILIES else export_portable
        export(family_source(name), folder, lambda line: None)
        return folder

    return make


@pytest.fixture(scope="session")
def bring(tmp_path_factory: pytest.TempPathFactory) -> Bring:
    """Folders that `quantize` did not write, by a maker of `folders`; each is made once."""

    @cache
    def make(maker: Callable[..., Path], source: Path, *arguments: str) -> Path:
        return maker(source, tmp_path_factory.mktemp(maker.__name__) / "folder", *arguments)

    return make


@pytest.fixture(scope="session")
def tiny_phi3(build_folder: Build, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    source = make_phi3(tmp_path_factory.mktemp("phi3"))
    return TinyModel(source, build_folder(source, "fp32"), TorchReference(source))


@pytest.fixture(scope="session")
def tiny_llama(build_folder: Build, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    source = make_llama(tmp_path_factory.mktemp("llama"))
    return TinyModel(source, build_folder(source, "fp32"), TorchReference(source))


@pytest.fixture(scope="session")
def default_server() -> Iterator[LiveServer]:
    """The default model's, for all that only ask it something."""
    assert DEFAULT_FOLDER.is_dir(), "run `make model` first (`make test` does)"
    with LiveServer(DEFAULT_FOLDER) as server:
        yield server.wait_ready()


@pytest.fixture(scope="session", params=["phi3", "llama"])
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    """Both architectures, one after the other."""
    model: TinyModel = request.getfixturevalue(f"tiny_{request.param}")
    return model
