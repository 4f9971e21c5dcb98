"""As containers run it (FR33): any uid, nothing writable but one folder for temporary files, no
network. The rest of the machine is read-only there, so that a write elsewhere would fail."""

from __future__ import annotations

import json
import subprocess
import sys

from .conftest import TinyModel
from .contained import MODEL, TEMP, UID, contained, skip_without_namespaces
from .live import ROOT


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
