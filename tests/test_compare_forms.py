"""The comparison of all forms, on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import compare_forms
import pytest
from click.testing import CliRunner

from .conftest import TinyModel

SCRIPT = Path(__file__).parents[1] / "scripts" / "compare_forms.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_every_form_is_built_judged_and_measured(tiny_llama: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "forms.json"
    arguments = ["--forms", "int8-bare,int8", "--repeats", "1", "--tokens", "32"]
    done = run("--model", str(tiny_llama.source), *arguments, "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == report

    forms = {row["form"]: row for row in report["forms"]}
    assert list(forms) == ["plain", "fp32", "int8", "int8-bare"]
    assert abs(forms["plain"]["quality"]["mean_kl"]) < 1e-6  # the same model
    assert forms["fp32"]["quality"] is None
    assert 1e-6 < forms["int8"]["quality"]["mean_kl"] < 0.1
    assert forms["int8"]["quantization"]["rotated"] == "yes"
    assert forms["int8-bare"]["quantization"]["rotated"].startswith("no")
    for row in forms.values():
        assert min(row["measured"].values()) > 0
        bytes_of_both = row["measured"]["bytes"], forms["plain"]["measured"]["bytes"]
        ratio = round(bytes_of_both[0] / bytes_of_both[1], 4)
        assert row["ratio_to_plain"]["bytes"] == {"median": ratio, "min": ratio, "max": ratio}


def test_prompt_beyond_the_context_is_refused(tiny_llama: TinyModel) -> None:
    handled = signal.getsignal(signal.SIGTERM)
    arguments = ["--model", str(tiny_llama.source), "--tokens", "257"]
    try:
        done = CliRunner().invoke(compare_forms.main, arguments)
    finally:
        signal.signal(signal.SIGTERM, handled)
    assert done.exit_code == 1
    assert "--tokens 257 is more than its context of 256 tokens" in done.output
