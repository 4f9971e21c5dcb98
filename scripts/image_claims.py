"""What is claimed of an image and of a container of it. A claim that does not hold raises.

Each is a function, named as what holds. `image_check.py` shows that each holds of ours and, so that
it is known to look at something, that it does not hold of a bad one.
"""

import json
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from podman import Container, config, files, podman

ROOT = Path(__file__).parents[1]
UID, GID = "23456", "34567"  # any that the image does not name
CPUS = 1  # fewer than the machine's, or the claim about threads would hold anyway
MEMORY = 2 << 30
DRAIN_SECONDS = 20
HARDENED = (
    *("--network", "none", "--read-only", "--tmpfs", "/tmp:rw,noexec,nosuid,size=64m"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{UID}:{GID}"),
    *("--cpus", str(CPUS), "--memory", str(MEMORY), "--pids-limit", "256"),
    *("--env", f"DRAIN_SECONDS={DRAIN_SECONDS}"),
)
TOOLS = ("gcc", "g++", "cc", "c++", "ld", "make", "nvcc", "git", "sshd")
BUILD_ONLY = (
    "onnxruntime_genai",
    "accelerate",
    "gguf",
    "onnx_ir",
    "datasets",
    "quantize",
    "pytest",
)
TELEMETRY_OFF = {
    *("ORT_DISABLE_TELEMETRY=1", "HF_HUB_OFFLINE=1", "HF_HUB_DISABLE_TELEMETRY=1"),
    "TOKENIZERS_PARALLELISM=false",
}


@dataclass(frozen=True)
class Image:
    name: str
    secret: str  # was there while it was built
    store: Path  # the engine's, which holds each layer of each stage


# Of an image.


def user_is_not_root(image: Image) -> None:
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", config(image.name)["User"]), config(image.name)[
        "User"
    ]


def only_port_8080_is_exposed(image: Image) -> None:
    assert list(config(image.name)["ExposedPorts"]) == ["8080/tcp"]


def labels_tell_what_it_is(image: Image) -> None:
    labels = config(image.name)["Labels"]
    version = re.search('VERSION = "(.+)"', (ROOT / "app/config.py").read_text())
    assert version and labels["org.opencontainers.image.version"] == version[1], labels
    for name in ("title", "description", "licenses", "revision", "base.name"):
        assert labels.get(f"org.opencontainers.image.{name}"), name


def nothing_reports_home(image: Image) -> None:
    missing = TELEMETRY_OFF - set(config(image.name)["Env"])
    assert not missing, missing


def it_has_a_healthcheck(image: Image) -> None:
    assert (config(image.name)["Healthcheck"] or {}).get("Test", [""])[0] == "CMD"


def no_layer_has_the_secret(image: Image) -> None:
    """Nor the history, nor the config: both lie in the store."""
    told = podman("history", "--no-trunc", image.name) + json.dumps(config(image.name))
    assert image.secret not in told, "in the history or the config"
    layers = [str(path) for path in (image.store / "overlay").glob("*/diff")]
    assert layers, image.store
    command = ["grep", "-rlaF", "-m1", image.secret, *layers, str(image.store / "overlay-images")]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 1, found.stdout + found.stderr  # 2 would be an error


def one_onnxruntime_is_installed(image: Image) -> None:
    code = (ROOT / "scripts/check_wheels.py").read_text()
    podman(
        "run", "--rm", "-i", "--network=none", "--entrypoint=python3", image.name, "-", text=code
    )


def no_file_is_writable_by_others(image: Image) -> None:
    """But the folders that are there for it (sticky), and devices; nor by the image's own user."""
    uid = config(image.name)["User"].partition(":")[0]
    with files(image.name) as root:
        command = ["find", str(root), "-xdev", "(", "-type", "f", "-o", "-type", "d", ")"]
        command += ["(", "-perm", "-o+w", "-not", "-perm", "-1000"]
        command += ["-o", "-uid", uid if uid != "0" else "10001", ")", "-printf", "/%P\n"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not found, found


def nothing_is_left_of_the_build(image: Image) -> None:
    with files(image.name) as root:
        tools = [root / place / tool for place in ("bin", "usr/bin", "usr/sbin") for tool in TOOLS]
        places = [root / "root/.cache", root / "build", root / "srv/tests", root / "srv/.git"]
        site = next((root / "opt/venv/lib").glob("python3*/site-packages"))
        places += [site / name for name in BUILD_ONLY] + [root / "srv/quantize"]
        left = [path for path in tools + places if path.exists()]
        left += [*site.rglob("tests"), *(root / "srv").rglob("*.whl")]
        assert not left, left


def dependencies_code_and_model_are_layers(image: Image) -> None:
    """So that a change of the code moves megabytes, not gigabytes."""
    layers = json.loads(podman("image", "inspect", image.name))[0]["RootFS"]["Layers"]
    known = json.loads((image.store / "overlay-layers/layers.json").read_text())
    folders = {layer.get("diff-digest"): image.store / "overlay" / layer["id"] for layer in known}
    places = [
        {"/".join(path.relative_to(top / "diff").parts[:2]) for path in (top / "diff").glob("*/*")}
        for top in (folders[layer] for layer in layers)
    ]
    assert places[-3:] == [{"opt/venv"}, {"srv/app", "srv/LICENSE"}, {"models/default"}], places[
        -3:
    ]


# Of a container that runs with HARDENED.


def _status(container: Container) -> dict[str, str]:
    lines = container.read("/proc/1/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def it_runs_as_the_user_that_was_asked_for(container: Container) -> None:
    status = _status(container)
    assert set(status["Uid"].split()) == {UID}, status["Uid"]
    assert set(status["Gid"].split()) == {GID}, status["Gid"]


def it_has_no_capability(container: Container) -> None:
    status = _status(container)
    held = {name: status[name] for name in status if name.startswith("Cap")}
    assert len(held) >= 4 and not any(int(bits, 16) for bits in held.values()), held


def it_gains_no_privilege(container: Container) -> None:
    assert _status(container)["NoNewPrivs"] == "1"


def its_root_is_read_only(container: Container) -> None:
    for place in ("/", "/srv", "/models", "/opt/venv", "/etc"):
        code = f"import os; print(os.statvfs({place!r}).f_flag & os.ST_RDONLY)"
        assert podman("exec", container.name, "python3", "-c", code).strip() == "1", place


def it_has_no_network(container: Container) -> None:
    names = re.findall(r"^ *(\S+):", container.read("/proc/1/net/dev"), re.M)
    assert names == ["lo"], names


def it_is_alive_and_ready(container: Container) -> None:
    for path in ("/health/live", "/health/ready"):
        assert container.ask(path)[0] == 200, path


def it_generates(container: Container) -> None:
    status, answer = container.ask("/generate", {"prompt": "Gravity is", "max_tokens": 8})
    assert status == 200, answer
    assert json.loads(answer)["usage"]["completion_tokens"] == 8, answer
    assert json.loads(answer)["text"].strip(), answer


def its_metrics_count_that(container: Container) -> None:
    assert "phi_serve_generation_tokens_total" in container.ask("/metrics")[1]
    before = _generated(container)
    container.ask("/generate", {"prompt": "Gravity is", "max_tokens": 8})
    assert _generated(container) - before == 8, (before, _generated(container))


def _generated(container: Container) -> float:
    text = container.ask("/metrics")[1]
    values = re.findall(r"^phi_serve_generation_tokens_total(?:{.*})? (\S+)$", text, re.M)
    return sum(float(value) for value in values)


def its_threads_are_the_quota(container: Container) -> None:
    assert (os.cpu_count() or 1) > CPUS, "a machine of one CPU cannot show it"
    assert json.loads(container.ask("/info")[1])["threads"] == CPUS, container.ask("/info")[1]


def its_memory_is_limited(container: Container) -> None:
    code = (
        "from pathlib import Path; p = Path('/sys/fs/cgroup/memory.max'); "
        "q = Path('/sys/fs/cgroup/memory/memory.limit_in_bytes'); "
        "print((p if p.exists() else q).read_text())"
    )
    assert podman("exec", container.name, "python3", "-c", code).strip() == str(MEMORY)


def its_healthcheck_tells_a_frozen_server(container: Container) -> None:
    assert container.is_healthy(), "unhealthy, though it serves"
    podman("kill", "--signal", "STOP", container.name)
    try:
        assert not container.is_healthy(), "healthy, though it is frozen"
    finally:
        podman("kill", "--signal", "CONT", container.name)


def sigterm_lets_a_stream_end_and_exits_with_0(container: Container) -> None:
    """To be the last one: it ends the container."""
    stream = container.stream("/generate", {"prompt": "One, two,", "max_tokens": 60})
    assert stream.stdout and stream.stdout.readline().startswith("data: "), "no stream"
    began_at = time.monotonic()
    podman("stop", "-t", str(DRAIN_SECONDS + 10), container.name)
    took = time.monotonic() - began_at
    text = stream.communicate()[0]
    assert '"finish_reason":"length"' in text, text[-500:]
    assert container.exit_code == 0, (container.exit_code, container.log)
    assert took < DRAIN_SECONDS, took


def serves(container: Container, model: str) -> None:
    assert json.loads(container.ask("/info")[1])["model"] == model, container.ask("/info")[1]


IMAGE_CLAIMS = (
    *(user_is_not_root, only_port_8080_is_exposed, labels_tell_what_it_is, nothing_reports_home),
    *(it_has_a_healthcheck, no_layer_has_the_secret, one_onnxruntime_is_installed),
    *(no_file_is_writable_by_others, nothing_is_left_of_the_build),
    dependencies_code_and_model_are_layers,
)
CONTAINER_CLAIMS = (
    *(it_runs_as_the_user_that_was_asked_for, it_has_no_capability, it_gains_no_privilege),
    *(its_root_is_read_only, it_has_no_network, it_is_alive_and_ready, it_generates),
    *(its_metrics_count_that, its_threads_are_the_quota, its_memory_is_limited),
    *(its_healthcheck_tells_a_frozen_server, sigterm_lets_a_stream_end_and_exits_with_0),
)
