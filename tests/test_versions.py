"""A set of libraries that exports were not tested with is refused before any work (FR02)."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantize.errors import QuantizeError
from quantize.versions import GOOD, check_versions

from .commands import run_quantize


def pretend(folder: Path, name: str, version: str) -> None:
    """What pip leaves of an installation, where Python looks first."""
    installed = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    installed.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (installed / "METADATA").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def test_installed_set_is_good_and_told_in_one_line() -> None:
    line = check_versions()
    assert "\n" not in line
    assert all(f"{name} " in line for name in GOOD if name != "onnxruntime")


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("transformers", "5.1.0"),
        ("transformers", "4.30.0"),
        ("optimum-onnx", "0.2.0"),
        ("onnxruntime-genai", "0.15.2"),
        ("onnxruntime", "1.32.0"),
    ],
)
def test_version_outside_is_refused_with_the_good_range(
    name: str, version: str, site: Path
) -> None:
    pretend(site, name, version)
    first, beyond = GOOD[name]
    with pytest.raises(QuantizeError, match=f"{name} {version}.*{name} >={first},<{beyond}"):
        check_versions()


def test_two_runtimes_at_once_are_refused(site: Path) -> None:
    pretend(site, "onnxruntime", "1.26.0")
    pretend(site, "onnxruntime-gpu", "1.26.0")
    with pytest.raises(QuantizeError, match="onnxruntime and onnxruntime-gpu are both installed"):
        check_versions()


def test_command_refuses_before_it_looks_at_model_or_output(site: Path, tmp_path: Path) -> None:
    pretend(site, "transformers", "5.1.0")
    result = run_quantize("no such model", "--output", str(tmp_path / "out" / "model"))
    assert result.exit_code == 2
    assert "transformers 5.1.0" in result.stderr
    assert not (tmp_path / "out").exists()
