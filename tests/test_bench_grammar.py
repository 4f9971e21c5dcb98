"""The benchmark of constrained decoding, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .conftest import TinyModel

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_grammar.py"


def test_every_kind_is_measured(tiny_llama: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "grammar.json"
    arguments = ["--rows", "1,3", "--steps", "8", "--repeats", "1", "--json", str(file)]
    command = [sys.executable, str(SCRIPT), "--model", str(tiny_llama.folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == report
    assert [row["rows"] for row in report["results"]] == [1, 3]
    assert all(
        row["tokens_per_second"].keys() == {"none", "one", "all"} for row in report["results"]
    )
