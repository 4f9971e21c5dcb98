"""The benchmark of the host's share of a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_host.py"


def test_every_mix_is_measured_beside_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    sizes = ["--rows", "1,3", "--vocab", "400", "--steps", "2", "--repeats", "2"]
    command = [sys.executable, str(SCRIPT), *sizes, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
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
