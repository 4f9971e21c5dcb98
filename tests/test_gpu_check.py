"""The check for a machine with a GPU, as far as it runs without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from app.graph import read_graph

from .conftest import Build, TinyModel
from .live import ROOT

sys.path.append(str(ROOT / "scripts"))  # where a script finds its siblings

import gpu_build
import gpu_check
from gpu_build import Options
from make_random_model import PHI3_TINY

SCRIPT = ROOT / "scripts" / "gpu_check.sh"
NOTHING = Options("cpu", {}, Path(), quick=True)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, env=environment
    )


def test_sections_run_on_the_cpu(tiny_llama: TinyModel, built: Build, tmp_path: Path) -> None:
    folders = {"fp32": tiny_llama.folder, "int8": built(tiny_llama.source, "int8")}
    models = [f"--model={name}={folder}" for name, folder in folders.items()]
    file = tmp_path / "report.json"
    # The server under load takes most of the time, and has tests of its own (test_bench.py).
    names = gpu_check.LIMITS.keys() - {"build", "serving"}
    only = ["--only", ",".join(sorted(names))]
    done = run("--device", "cpu", "--quick", *models, *only, "--json", str(file))
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(file.read_text())
    assert json.loads(done.stdout) == report
    found = report["sections"]
    assert found.keys() == names
    assert found["correctness"]["logits"]["int8"]["worst_share_of_spread"] == 0  # it is the same
    assert found["in_place"]["one_column_written"] == {"fp32": True, "int8": True}
    assert found["copies"]["folders"]["fp32"]["nodes"]["CPUExecutionProvider"] > 0
    assert {row["rows"] for row in found["throughput"]["results"]} == {1, 2}
    assert all(row["tokens_per_second"] > 0 for row in found["throughput"]["results"])
    assert found["memory"]["rows"] == 2


def test_gpu_that_is_not_there_is_told_and_the_report_is_written(
    tiny_llama: TinyModel, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    only = ["--only", "environment,correctness", "--json", str(file)]
    done = CliRunner().invoke(gpu_check.main, [f"--model=tiny={tiny_llama.folder}", *only])
    assert done.exit_code == 1, done.output
    found = json.loads(file.read_text())["sections"]
    assert "torch" in found["environment"]["torch_problem"]
    assert "DEVICE=cuda" in found["correctness"]["error"]


def test_section_ends_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "child"

    def hang(options: Options) -> dict[str, Any]:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "writing").write_text(str(child.pid))
        (tmp_path / "writing").rename(mark)
        child.wait()
        return {"ok": True}

    with gpu_check.started(hang, NOTHING):
        until(mark.exists)
    until(lambda: not is_running(int(mark.read_text())))


def test_section_that_hangs_is_not_waited_for() -> None:
    found = gpu_check.run_limited(lambda options: {"ok": bool(signal.pause())}, NOTHING, 0.1)
    assert not found["ok"] and "within 0.1 s" in found["error"]


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at, "waited in vain"


def is_running(pid: int) -> bool:
    """A dead one may wait for whoever reaps it."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_folders_for_a_gpu_are_built_on_the_spot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_build, "SHAPES", {"tiny": PHI3_TINY | {"num_hidden_layers": 1}})
    options = Options("cuda", {}, tmp_path, quick=True)
    found = gpu_check.run_limited(gpu_build.build, options, 100)
    assert found["ok"], found
    folders = gpu_build.built(tmp_path)
    assert list(folders) == ["tiny-fp16", "tiny-int8"]
    assert all(read_graph(folder).kv_type == "float16" for folder in folders.values())


@pytest.mark.parametrize("end", ["raises", "dies"])
def test_section_that_fails_says_so(end: str) -> None:
    def fail(options: Options) -> dict[str, Any]:
        if end == "dies":
            os._exit(3)
        raise ValueError("no such thing")

    found = gpu_check.run_limited(fail, NOTHING, 60)
    assert not found["ok"]
    assert found["error"] in ("ValueError: no such thing", "the process died")


def test_page_on_gpus_says_how_long_it_takes() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert f"({sum(gpu_check.LIMITS.values())} seconds together)" in page


def test_sections_have_less_time_together_than_the_script() -> None:
    [budget] = [line for line in SCRIPT.read_text().splitlines() if line.startswith("BUDGET")]
    assert sum(gpu_check.LIMITS.values()) + 15 < int(budget.split("=")[1]) <= 480


def test_runtime_comes_in_parts(tmp_path: Path) -> None:
    wheel = tmp_path / "nothing-1.0-py3-none-any.whl"
    for part, content in (("aa", b"PK"), ("ab", b"not a wheel")):
        (tmp_path / f"{wheel.name}.part-{part}").write_bytes(content)
    done = run("--runtime", str(wheel), "--only", "environment", "--device", "cpu")
    assert done.returncode != 0
    assert wheel.name in done.stderr  # pip has got it as one file, and says what it is not
    done = run("--wheels", str(tmp_path), "--only", "environment", "--device", "cpu")
    assert wheel.name in done.stderr
    assert "neither" in run("--runtime", str(tmp_path / "absent.whl")).stderr
