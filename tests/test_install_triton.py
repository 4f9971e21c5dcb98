"""The real tritonserver that tests run: it is there, whole, and installed once."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import install_triton
import pytest
from install_triton import CannotInstall, install

from .triton import TritonServer, needs_triton

MODEL = """
import sys
import numpy
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        import pydantic
        told = [sys.prefix, numpy.__version__, pydantic.__version__]
        tensor = pb_utils.Tensor("told", numpy.array(told, dtype=object))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
"""
CONFIG = """
backend: "python"
input [ { name: "asked" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "told" data_type: TYPE_STRING dims: [ 3 ] } ]
"""


def test_a_model_has_numpy_1_and_behind_it_the_packages_of_this_python(tmp_path: Path) -> None:
    launcher = needs_triton()
    (tmp_path / "told" / "1").mkdir(parents=True)
    (tmp_path / "told" / "1" / "model.py").write_text(MODEL)
    (tmp_path / "told" / "config.pbtxt").write_text(CONFIG)
    with TritonServer(tmp_path) as server:
        response = server.post("/v2/models/told/generate", asked="?")
        assert server.stop() == 0
    prefix, numpy, pydantic = response.json()["told"]
    assert Path(prefix) == launcher.parent.resolve()
    assert numpy.startswith("1.26.")
    assert pydantic == version("pydantic")


def test_what_is_installed_is_not_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = needs_triton()

    def run(*_: object, **__: object) -> None:
        raise AssertionError("something was run")

    monkeypatch.setattr(subprocess, "run", run)
    assert install(launcher.parent) == launcher


def test_another_machine_is_told_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install_triton.platform, "machine", lambda: "aarch64")
    with pytest.raises(CannotInstall, match="x86_64"):
        install(tmp_path)
