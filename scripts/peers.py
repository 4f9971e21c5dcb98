"""The servers that compare_peers.py measures: how each is started, asked and weighed."""

import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path

import psutil
from dialects import Target
from load_report import connect, server_facts
from workload import Fit, ProbeFailed

OURS, PLAIN = "phi-serve", "plain"
START_SECONDS = 600
# Peers that are libraries: the adapter that serves them, what they are imported as, their package.
ADAPTERS = {
    "openvino": ("scripts/peer_openvino.py", "openvino_genai", "openvino-genai"),
    "onnxruntime-genai": ("scripts/peer_genai.py", "onnxruntime_genai", "onnxruntime-genai"),
}
SERVERS = ("llama.cpp", "vllm")  # that are looked for, with the adapters; others may be given


@dataclass(frozen=True)
class Peer:
    """`command` has {port} where the port goes. `absence` says why it cannot be started."""

    name: str
    command: str
    api: str = "completions"
    stream: bool = True
    absence: str = ""


@dataclass(frozen=True)
class Running:
    peer: Peer
    target: Target
    pid: int
    fit: Fit = Fit(0, 1)

    def fitted(self, found: Fit) -> "Running":
        return replace(self, fit=found)

    def shown(self) -> str:
        """Its command without the folders of this machine."""
        words = shlex.split(self.peer.command)
        return " ".join(Path(word).name if word.startswith("/") else word for word in words)


def known_peers(
    commands: Mapping[str, str], pythons: Mapping[str, str], models: Mapping[str, str]
) -> list[Peer]:
    """Those given, and the well-known ones that are not, as absent."""
    found = [Peer(name, command) for name, command in commands.items()]
    for name, (script, module, package) in ADAPTERS.items():
        if name in commands:
            continue
        python, model = pythons.get(name), models.get(name)
        if not python or not model:
            found.append(Peer(name, "", absence=f"no --peer-python and --peer-model {name}=PATH"))
        elif subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
            found.append(Peer(name, "", absence=f"{package} is not installed in its environment"))
        else:
            words = [python, script, "--model", model, "--port", "{port}"]
            found.append(Peer(name, shlex.join(words).replace("'{port}'", "{port}")))
    absent = [name for name in SERVERS if name not in commands]
    return found + [Peer(name, "", absence=f"no --peer {name}=COMMAND") for name in absent]


@contextmanager
def started(peer: Peer, folder: Path) -> Iterator[Running]:
    """Run a server in `folder` on a free port until the context closes; yield it once it is ready.

    Raises: ProbeFailed: it did not become ready; OSError: there is no such command
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = shlex.split(peer.command.replace("{port}", str(port)))
    server = subprocess.Popen(command, cwd=folder, stdout=sys.stderr)
    try:
        give_up_at = time.monotonic() + START_SECONDS
        while not is_ready(url):
            if (status := server.poll()) is not None:
                raise ProbeFailed(f"it ended with {status} before it was ready")
            if time.monotonic() > give_up_at:
                raise ProbeFailed(f"it was not ready after {START_SECONDS} s")
            time.sleep(0.2)
        model = server_facts(url).get("model_id", "default")
        yield Running(peer, Target(url, peer.api, peer.stream, model), server.pid)
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        server.kill()  # does nothing to a server that has ended
        server.wait()


def is_ready(url: str) -> bool:
    """By ours and the plain one's path, or by that of llama.cpp, vLLM and the adapters."""
    for path in ("/health/ready", "/health"):
        with suppress(OSError, HTTPException), closing(connect(url)) as connection:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return True
    return False


def memory_bytes(pid: int) -> int:
    """Resident memory of a server and all that it started."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total
