"""The true-size benchmark, on a model that is not of true size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.make_random_model import PHI3_TINY, make_model

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_phi3.py"
STAGES = ["starting", "reading weights", "writing the fp32 graph", "quantizing"]
STAGES += ["comparing with fp32", "measuring speed"]
# As little as has every stage; a short context makes the gate's rows short.
CONFIG = PHI3_TINY | {"num_hidden_layers": 1, "max_position_embeddings": 128}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_report_has_every_stage_its_memory_and_the_load(tmp_path: Path) -> None:
    work, file, model = tmp_path / "work", tmp_path / "report.json", tmp_path / "model"
    model.mkdir()
    make_model(model, CONFIG | {"original_max_position_embeddings": 128})
    load = ["--prompt-tokens", "20", "--output-tokens", "8", "--requests", "8"]
    arguments = ["--model", str(model), "--work", str(work), "--json", str(file), *load]
    done = run(*arguments, "--max-model-len", "128", "--", "--allow-quality-loss")
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
    # Both graphs lay on the disk at once.
    assert pipeline["peak_disk_bytes"] > 1.5 * sum(report["folder"]["files"].values())

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
