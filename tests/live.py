"""A server as its own process, spoken to over real sockets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests

from app.config import OPTIONS

ROOT = Path(__file__).parents[1]
LISTENING = re.compile(r"listening on (http://[\w.:\[\]]+)")


class LiveServer:
    """`python -m app` on a free port of the loopback interface. Use as a context manager."""

    module = "app"

    def __init__(self, model: Path, *arguments: str, **environment: str) -> None:
        self._lines: list[str] = []
        names = {option.envvar for option in OPTIONS}
        inherited = {name: value for name, value in os.environ.items() if name not in names}
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, "--host", "127.0.0.1", "--port", "0", *arguments],
            cwd=ROOT,
            env=inherited | {"MODEL_PATH": str(model)} | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            found = wait_for(
                lambda: re.search(r"listening on (http://[\w.:\[\]]+)", self.log), "a bound socket"
            )
        except AssertionError:
            self.__exit__()
            raise
        self.url: str = found[1]

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self._lines.extend(iter(self.process.stderr.readline, ""))

    def wait_ready(self) -> LiveServer:
        wait_for(lambda: self.get("/health/ready").status_code == 200, "readiness")
        return self

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=60)

    def post(self, path: str = "/generate", **body: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=120)

    def generate(self, prompt: str, **body: Any) -> dict[str, Any]:
        response = self.post(prompt=prompt, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, prompt: str, **body: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, as they come."""
        payload = {"prompt": prompt, "stream": True, **body}
        with requests.post(
            self.url + "/generate", json=payload, stream=True, timeout=120
        ) as response:
            assert response.status_code == 200, response.text
            for line in response.iter_lines():
                if line:
                    assert line.startswith(b"data: ")
                    yield json.loads(line[6:])

    def metric(self, name: str) -> float:
        """The value of a sample, labels included in `name`; 0 if it does not exist yet."""
        found = re.search(rf"^phi_serve_{re.escape(name)} (\S+)$", self.get("/metrics").text, re.M)
        return float(found[1]) if found else 0.0


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Polls until `condition` is true; fails after `seconds`."""
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s for {what}")
