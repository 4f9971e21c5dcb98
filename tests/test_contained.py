"""As containers run it (FR33): any uid, nothing writable but one folder for temporary files, no
network. The rest of the machine is read-only there, so that a write elsewhere would fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import TinyModel
from .contained import (
    MODEL,
    TEMP,
    UID,
    as_first_process,
    contained,
    skip_without_namespaces,
    skip_without_process_namespaces,
)
from .live import ROOT, wait_for


def test_unknown_user_without_home_and_network_serves_from_a_read_only_machine(
    tiny_llama: TinyModel,
) -> None:
    skip_without_namespaces()
    command = contained(tiny_llama.folder, sys.executable, "-m", "tests.inside", MODEL, TEMP)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert (told["uid"], told["home"], told["writable"]) == (UID, None, [])
    assert told["usage"]["completion_tokens"] == 3, told["log"]
    assert told["exit"] == 0
    assert told["left"] == [f"{TEMP}/log"]
    # Nothing is amiss, and nothing has been connected to.
    levels = {json.loads(line)["level"] for line in told["log"].splitlines()}
    assert levels == {"INFO"}, told["log"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_process_hears_signals_before_it_imports_any_library(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Those take a quarter of a second; one stands in for all, and never ends."""
    skip_without_process_namespaces()
    reached = tmp_path / "reached"
    (tmp_path / "click.py").write_text(
        f"import pathlib, time\npathlib.Path({str(reached)!r}).touch()\ntime.sleep(60)\n"
    )
    server = subprocess.Popen(
        as_first_process(sys.executable, "-m", "app"),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    try:
        wait_for(reached.exists, "the import")
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(children[0]), number)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
