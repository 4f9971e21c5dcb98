"""The sampler's benchmark, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench_sampler
import pytest
from click.testing import CliRunner

from .conftest import TinyModel

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_sampler.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_every_mix_is_measured_beside_the_model(tiny_llama: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    sizes = ["--rows", "5", "--steps", "1", "--repeats", "2", "--prompt-tokens", "5"]
    done = run("--model", str(tiny_llama.folder), *sizes, "--threads", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == report
    assert [row["mix"] for row in report["results"]] == [
        "greedy",
        "temperature",
        "mixed",
        "everything",
        "masked",
    ]
    for row in report["results"]:
        assert len(row["share_runs"]) == 2
        assert min(row["model_ms"], row["sampler_ms"], row["share"]) > 0
        share = row["sampler_ms_runs"][0] / row["model_ms_runs"][0]
        assert row["share_runs"][0] == pytest.approx(share, abs=1e-4)


@pytest.mark.slow
def test_rows_beyond_the_context_are_refused(tiny_llama: TinyModel) -> None:
    arguments = ["--model", str(tiny_llama.folder), "--prompt-tokens", "300"]
    done = CliRunner().invoke(bench_sampler.main, arguments)
    assert done.exit_code == 1
    assert "--prompt-tokens, --steps and --rows need 367 tokens" in done.output
