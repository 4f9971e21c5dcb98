"""The benchmark of the host's share of a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from click.testing import CliRunner

from .live import ROOT

sys.path.append(str(ROOT / "scripts"))  # where a script finds its siblings

import bench_host


def test_every_mix_is_measured_beside_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    sizes = ["--rows", "1,3", "--vocab", "400", "--steps", "2", "--repeats", "2"]
    done = CliRunner().invoke(bench_host.main, [*sizes, "--json", str(file)])
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == report
    cases = [(row["mix"], row["rows"], row["limit_ms"]) for row in report["results"]]
    assert cases == [
        ("greedy", 1, 0.32),
        ("greedy", 3, 0.36),
        ("mixed", 1, 0.32),
        ("mixed", 3, 0.36),
    ]
    assert all(len(row["host_ms_runs"]) == 2 and row["host_ms"] > 0 for row in report["results"])
