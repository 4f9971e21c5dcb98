"""The true-size benchmark, on a model that is not of true size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "bench_phi3.py"
STAGES = ["starting", "reading weights", "writing the fp32 graph", "quantizing"]
STAGES += ["comparing with fp32", "measuring speed"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_report_has_every_stage_its_memory_and_the_load(tmp_path: Path) -> None:
    work, file = tmp_path / "work", tmp_path / "report.json"
    load = ["--prompt-tokens", "20", "--output-tokens", "8", "--requests", "8"]
    arguments = ["--like", "phi3-tiny", "--work", str(work), "--json", str(file), *load]
    done = run(*arguments, "--", "--allow-quality-loss")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert json.loads(file.read_text()) == report

    pipeline = report["pipeline"]
    assert [stage["stage"] for stage in pipeline["stages"]] == STAGES
    assert sum(stage["seconds"] for stage in pipeline["stages"]) == pytest.approx(
        pipeline["seconds"], abs=0.5
    )
    peaks = {found["process"]: found for found in pipeline["processes"]}
    assert {"quantize", "quantize.speed"} <= peaks.keys()
    assert 100e6 < peaks["quantize"]["peak_anon_bytes"] < peaks["quantize"]["peak_rss_bytes"]
    # The sources and both graphs lay on the disk at once.
    sizes = [*report["source"]["files"].values(), *report["folder"]["files"].values()]
    assert pipeline["peak_disk_bytes"] > sum(sizes)

    rows = report["server"]["results"]
    assert [(row["concurrency"], row["failed"]) for row in rows] == [(1, 0), (8, 0)]
    assert all(row["server_memory"]["peak_rss_bytes"] > 100e6 for row in rows)
    assert report["quantization"]["precision"] == "int8"
    assert not [*work.iterdir()]


def test_pipeline_that_fails_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    file = tmp_path / "report.json"
    done = run("--model", str(empty), "--work", str(tmp_path / "work"), "--json", str(file))
    assert done.returncode == 1
    assert "-m quantize" in done.stderr
    assert "config.json is missing" in done.stderr
    assert not [*(tmp_path / "work").iterdir()]
    assert not file.exists()
