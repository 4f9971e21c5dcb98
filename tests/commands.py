"""The command lines of both packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from quantize.__main__ import main

from .live import ROOT


def run_quantize(*arguments: str) -> Result:
    """In this process: the imports take longer than a tiny model."""
    return CliRunner().invoke(main, arguments)


def run_app(*arguments: str, model: Path) -> subprocess.CompletedProcess[str]:
    """A server that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        env=os.environ | {"MODEL_PATH": str(model)},
        capture_output=True,
        text=True,
        timeout=60,
    )
