"""`python -m tests.inside MODEL TEMP`: serves MODEL, asks it something, ends it; says as JSON what
became of that. For namespaces that cannot be looked into from outside; nothing but the standard
library."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

# `python -m app`, but that a line of its log tells of each attempt to connect.
_SERVE = """
import json, runpy, sys
def hear(event, arguments):
    if event in ("socket.connect", "socket.gethostbyname", "socket.sendto"):
        print(json.dumps({"level": event, "arguments": repr(arguments)}), file=sys.stderr)
sys.addaudithook(hear)
runpy.run_module("app", run_name="__main__", alter_sys=True)
"""
SHOULD_NOT_BE_WRITABLE = (".", "/tmp", "/var/tmp", "/dev/shm", "/")
_SECONDS = 60


def main(model: str, temp: str) -> None:
    log = Path(temp, "log")
    with log.open("w") as file:
        server = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _SERVE,
                *("--model", model, "--host", "127.0.0.1", "--port", "0"),
            ],
            stderr=file,
        )
    told = {"uid": os.getuid(), "home": os.environ.get("HOME"), "writable": writable()}
    try:
        url = read_url(log)
        wait_ready(url)
        body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
        head = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/generate", body, head)) as got:
            told["usage"] = json.load(got)["usage"]
        server.send_signal(signal.SIGTERM)
        told["exit"] = server.wait(_SECONDS)
    finally:
        server.kill()
        told["log"] = log.read_text()
        told["left"] = [str(path) for path in Path(temp).rglob("*") if path.is_file()]
        print(json.dumps(told))


def writable() -> list[str]:
    return [folder for folder in SHOULD_NOT_BE_WRITABLE if os.access(folder, os.W_OK)]


def read_url(log: Path) -> str:
    give_up_at = time.monotonic() + _SECONDS
    while time.monotonic() < give_up_at:
        if found := re.search(r"listening on (http://[\w.:]+)", log.read_text()):
            return found[1]
        time.sleep(0.02)
    raise SystemExit("the server does not listen")


def wait_ready(url: str) -> None:
    give_up_at = time.monotonic() + _SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/health/ready").close()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > give_up_at:
                raise
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
