"""Images and containers by podman, as `image_check.py` needs them. Knows nothing of claims.

A container has no network: it is asked from within its network namespace, by curl.
"""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_SECONDS = 240  # a loaded machine imports libraries for a while


def podman(*arguments: str, check: bool = True, text: str | None = None) -> str:
    """Its output; what it says of systemd, which is not here, goes with its errors."""
    done = subprocess.run(["podman", *arguments], input=text, capture_output=True, text=True)
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise RuntimeError(f"{said[-1]} (podman {' '.join(arguments)})")
    return done.stdout


@contextlib.contextmanager
def files(image: str) -> Iterator[Path]:
    """The image's files, as one folder."""
    try:
        yield Path(podman("image", "mount", image).strip())
    finally:
        podman("image", "umount", image)


def config(image: str) -> dict[str, Any]:
    [inspected] = json.loads(podman("image", "inspect", image))
    found: dict[str, Any] = inspected["Config"]
    return found | {"Healthcheck": inspected.get("Healthcheck") or found.get("Healthcheck")}


@dataclass
class Container:
    name: str

    @property
    def pid(self) -> str:
        return self._inspect("{{.State.Pid}}")

    @property
    def exit_code(self) -> int:
        return int(self._inspect("{{.State.ExitCode}}"))

    @property
    def is_running(self) -> bool:
        return self._inspect("{{.State.Status}}") == "running"

    @property
    def log(self) -> str:
        done = subprocess.run(["podman", "logs", self.name], capture_output=True, text=True)
        return done.stdout + done.stderr

    def _inspect(self, template: str) -> str:
        return podman("inspect", self.name, "--format", template).strip()

    def read(self, path: str) -> str:
        """A file, as the container's own user sees it."""
        code = f"print(open({path!r}).read(), end='')"
        return podman("exec", self.name, "python3", "-c", code)

    def curl(self, path: str, *arguments: str) -> list[str]:
        url = f"http://127.0.0.1:8080{path}"
        inside = ["nsenter", "-t", self.pid, "-n"]
        return [*inside, "curl", "-sS", "--noproxy", "*", "-m", "60", *arguments, url]

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """Status and body of the answer; 0 if there was none."""
        sent = ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body else []
        command = self.curl(path, "-w", "\n%{http_code}", *sent)
        done = subprocess.run(command, capture_output=True, text=True)
        answer, _, status = done.stdout.rpartition("\n")
        return int(status or 0), answer

    def stream(self, path: str, body: dict[str, Any]) -> subprocess.Popen[str]:
        command = self.curl(path, "-N", "-H", "Content-Type: application/json")
        command += ["-d", json.dumps(body | {"stream": True})]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait_ready(self, path: str = "/health/ready") -> None:
        give_up_at = time.monotonic() + READY_SECONDS
        while self.ask(path)[0] != 200:
            if not self.is_running or time.monotonic() > give_up_at:
                raise RuntimeError(f"{self.name} never answered {path}:\n{self.log}")
            time.sleep(0.2)

    def is_healthy(self) -> bool:
        """What the image's HEALTHCHECK says, run once."""
        command = ["podman", "healthcheck", "run", self.name]
        return subprocess.run(command, capture_output=True).returncode == 0


@contextlib.contextmanager
def running(image: str, *options: str) -> Iterator[Container]:
    container = Container(f"phi-serve-{time.monotonic_ns()}")
    podman("run", "-d", "--name", container.name, *options, image)
    try:
        yield container
    finally:
        podman("rm", "-f", "-t", "0", container.name, check=False)
