"""The server that soak.py loads: started or found, asked, and looked at while it works."""

import http.client
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import psutil
from compare_baseline import ROOT, START_SECONDS, is_ready
from soak_requests import WORDS, Served

HEALTH_SECONDS = 0.1
IDLE_SECONDS = 60.0  # in which everything must be over once nothing comes any more


@dataclass
class Watched:
    """The server, and its process if that is known."""

    address: tuple[str, int]
    process: psutil.Process | None
    log: Path | None = None

    def get(self, path: str) -> tuple[int, str]:
        with closing(http.client.HTTPConnection(*self.address, timeout=60)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with closing(http.client.HTTPConnection(*self.address, timeout=60)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())

    def metrics(self) -> dict[str, float]:
        found = re.findall(r"^phi_serve_(\S+) (\S+)$", self.get("/metrics")[1], re.M)
        return {name: float(value) for name, value in found}

    def look(self) -> dict[str, float]:
        """The process now: bytes, files, threads."""
        if self.process is None:
            return {}
        memory = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        kib = {name: int(found) for name, found in re.findall(r"^(\w+): +(\d+) kB", memory, re.M)}
        return {
            "rss_mib": kib["Rss"] / 1024,
            "anonymous_mib": kib["Anonymous"] / 1024,
            "files": self.process.num_fds(),
            "threads": self.process.num_threads(),
        }


@contextmanager
def served_at(
    url: str | None, pid: int | None, model: Path, args: tuple[str, ...]
) -> Iterator[Watched]:
    if url is not None:
        parts = urlsplit(url)
        process = psutil.Process(pid) if pid else None
        yield Watched((str(parts.hostname), int(parts.port or 80)), process)
        return
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as file:
            command = [sys.executable, "-m", "app", "--model", str(model.resolve()), *args]
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", "0"], cwd=ROOT, stderr=file
            )
        try:
            yield Watched(_wait_ready(process, log), psutil.Process(process.pid), log)
            process.terminate()
            if (status := process.wait(60)) != 0:
                raise click.ClickException(f"the server ended with status {status}")
        finally:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> tuple[str, int]:
    give_up_at = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < give_up_at:
        found = re.search(r"listening on http://([\d.]+):(\d+)", log.read_text())
        if found and is_ready(f"http://{found[1]}:{found[2]}"):
            return found[1], int(found[2])
        time.sleep(0.2)
    raise click.ClickException(f"the server did not become ready:\n{log.read_text()[-2000:]}")


def learn(watched: Watched, max_prompt: int, max_answer: int) -> tuple[Served, int]:
    """What the model allows, and how many rows it has."""
    info = json.loads(watched.get("/info")[1])
    words = WORDS * 5
    num_tokens = watched.post("/tokenize", {"prompt": " ".join(words)})["count"]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    longest = info["max_model_len"]
    served = Served(
        max_prompt=min(max_prompt, longest // 2),
        max_answer=min(max_answer, longest // 4),
        num_ids=info["vocab_size"],
        tokens_per_word=max(1.0, num_tokens / len(words)),
        has_chat="choices" in watched.post("/v1/chat/completions", chat),
        has_grammar=info["structured_output"],
    )
    return served, info["max_batch_size"]


def wait_idle(watched: Watched) -> dict[str, float]:
    """The metrics once nothing runs or waits, or behind the patience."""
    give_up_at = time.monotonic() + IDLE_SECONDS
    while True:
        metrics = watched.metrics()
        is_idle = not (metrics["num_requests_running"] or metrics["num_requests_waiting"])
        if is_idle or time.monotonic() > give_up_at:
            return metrics
        time.sleep(0.2)


class Sampler(threading.Thread):
    """Asks for health all the time, and takes a sample every few seconds."""

    def __init__(self, watched: Watched, seconds: float) -> None:
        super().__init__(daemon=True)
        self.samples: list[dict[str, float]] = []
        self.health: list[float] = []
        self.num_waiting = 0.0
        self.failures: list[str] = []
        self._watched = watched
        self._seconds = seconds
        self._is_over = threading.Event()
        self.began_at = time.monotonic()

    def run(self) -> None:
        next_at = time.monotonic()
        while not self._is_over.wait(HEALTH_SECONDS):
            try:
                began_at = time.monotonic()
                status, _ = self._watched.get("/health/live")
                self.health.append(time.monotonic() - began_at)
                if status != 200:
                    self.failures.append(f"/health/live: {status}")
                if time.monotonic() >= next_at:
                    next_at = time.monotonic() + self._seconds
                    self._sample()
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def end(self) -> None:
        self._is_over.set()
        self.join()

    def _sample(self) -> None:
        metrics = self._watched.metrics()
        self.num_waiting = metrics["num_requests_waiting"]
        self.samples.append(
            {
                "seconds": time.monotonic() - self.began_at,
                "waiting": self.num_waiting,
                "running": metrics["num_requests_running"],
                **self._watched.look(),
            }
        )
