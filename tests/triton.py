"""A real tritonserver as its own process; `scripts/install_triton.py` brings the program."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
from functools import cache
from pathlib import Path

import psutil
import pytest
import requests
from install_triton import CannotInstall, install

from .live import wait_for

_EXIT_SECONDS = 20
_CLOSE = {"Connection": "close"}  # on SIGTERM it waits for connections, idle ones too


@cache
def needs_triton() -> Path:
    """The program that starts the server, installed where it is missing. Where it cannot be, the
    test is skipped, but in CI it fails."""
    try:
        return install()
    except CannotInstall as error:
        reason = f"no tritonserver: {error}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


class TritonServer:
    """Serves a model repository on free ports of the loopback interface. Use as a context manager:
    inside, all its models are loaded."""

    def __init__(
        self, repository: Path, *arguments: str, seconds: float = 120, **environment: str
    ) -> None:
        program, ports = needs_triton(), _free_ports(3)
        self.url = f"http://127.0.0.1:{ports[0]}"
        self.grpc = f"127.0.0.1:{ports[1]}"
        self._metrics_url = f"http://127.0.0.1:{ports[2]}/metrics"
        self._shared = f"triton_{ports[0]}*"
        self._lines: list[str] = []
        options = {
            "model-repository": repository,
            **dict(zip(("http-port", "grpc-port", "metrics-port"), ports, strict=True)),
            **{f"{kind}-address": "127.0.0.1" for kind in ("http", "grpc", "metrics")},
            "exit-timeout-secs": _EXIT_SECONDS,
            "backend-config": f"python,shm-region-prefix-name=triton_{ports[0]}",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        self.process = subprocess.Popen(
            [program, *flags, *arguments],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # its stubs are processes, too
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            wait_for(self._is_ready, "tritonserver to load its models", seconds)
        except AssertionError as error:
            self.__exit__()
            raise AssertionError(f"{error}\n{self.log}") from None

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.process.poll() is None:
                self.stop()
        finally:
            self._kill()
            self._reader.join(10)
            assert self.process.stdout is not None
            self.process.stdout.close()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def stop(self) -> int:
        """Its exit status, on SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_EXIT_SECONDS + 20)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    @property
    def shared_memory(self) -> int:
        """Bytes of /dev/shm that its models have."""
        return sum(file.stat().st_size for file in Path("/dev/shm").glob(self._shared))

    @property
    def memory(self) -> int:
        """Resident bytes of it and its models' processes."""
        server = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in (server, *server.children()))

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=60, headers=_CLOSE)

    def post(self, path: str, **body: object) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=120, headers=_CLOSE)

    def metrics(self) -> str:
        return requests.get(self._metrics_url, timeout=60, headers=_CLOSE).text

    def metric(self, name: str) -> float:
        """The value of a sample, labels included in `name`; 0 if it does not exist yet."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.metrics(), re.M)
        return float(found[1]) if found else 0.0

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"it has ended with {self.process.returncode}"
        try:
            return self.get("/v2/health/ready").status_code == 200
        except requests.ConnectionError:
            return False

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._lines.extend(iter(self.process.stdout.readline, ""))

    def _kill(self) -> None:
        """The session that was started with it, whatever of it is left."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self.process.wait()


def _free_ports(num: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
