"""Dockerfile and .dockerignore, as far as they can be checked without an engine. With one they are
built and run by scripts/image_test.sh."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PathDistribution
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from check_wheels import find_owners, find_problems

from app.config import OPTIONS, VERSION

from .live import ROOT
from .test_drain import stub_server

TEXT = (ROOT / "Dockerfile").read_text()
SECRET = re.compile(r"token(?!iz)|secret|password|api_?key|credential", re.I)


@dataclass
class Stage:
    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # instruction, the rest

    def all(self, instruction: str) -> list[str]:
        return [rest for word, rest in self.steps if word == instruction]


def read_stages(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """Build arguments before the first stage, and the stages by their names."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^ *#.*\n", "", text, flags=re.M))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(str.strip, joined.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest.strip()).groups()  # type: ignore[union-attr]
            stages.append(Stage(base, name))
        elif stages:
            stages[-1].steps.append((word, rest.strip()))
        else:
            name, _, value = rest.partition("=")
            arguments[name] = value
    return arguments, {stage.name: stage for stage in stages}


ARGUMENTS, STAGES = read_stages(TEXT)
RUNTIME = STAGES["runtime"]


def environment(stage: Stage) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(stage.all("ENV"))))


def test_targets_are_there_and_the_last_has_no_model() -> None:
    assert {"builder", "runtime", "with-model"} <= STAGES.keys()
    assert STAGES["with-model"].base == "runtime"
    last = list(STAGES.values())[-1]
    assert (last.base, last.steps) == ("runtime", [])


def test_bases_are_build_arguments_with_full_tags_that_suit_the_requirements() -> None:
    bases = {stage.base for stage in STAGES.values()} - STAGES.keys() - {"scratch"}
    assert bases == {"${BASE_DEVEL}", "${BASE_RUNTIME}"}
    versions = set()
    for name, kind in (("BASE_DEVEL", "devel"), ("BASE_RUNTIME", "runtime")):
        tag = re.fullmatch(rf"pytorch/pytorch:([\d.]+)-cuda12\.4-cudnn9-{kind}", ARGUMENTS[name])
        assert tag is not None, ARGUMENTS[name]
        versions.add(tag[1])
    [torch] = versions
    lines = (ROOT / "requirements-gpu.txt").read_text()
    low, high = re.findall(r"^torch>=([\d.]+),<([\d.]+)$", lines, re.M)[0]
    as_numbers = [tuple(int(part) for part in text.split(".")) for text in (low, torch, high)]
    assert as_numbers == sorted(as_numbers)
    # The last for CUDA 12; the next would run on the CPU and say nothing.
    assert "onnxruntime-gpu==1.26.0" in lines.splitlines()


def test_versions_stand_in_the_requirements_alone() -> None:
    """Pinned there, each, but for torch and numpy, which have tested ranges."""
    for command in (step for stage in STAGES.values() for step in stage.all("RUN")):
        for installed in re.findall(r"pip\S* (?:.*? )?install ([^&]*)", command):
            words = " ".join(installed.split())
            assert words in {
                '-r "${REQUIREMENTS}" ${MORE_REQUIREMENTS:+-r "${MORE_REQUIREMENTS}"}',
                "--no-deps -r requirements-build.txt",
            }
    for stage in STAGES.values():
        for argument in stage.all("ARG"):
            name, _, value = argument.partition("=")
            assert name != "REQUIREMENTS" or (ROOT / value).is_file()
            assert name != "VERSION" or value == VERSION
    for name in ("requirements.txt", "requirements-gpu.txt", "requirements-build.txt"):
        for line in (ROOT / name).read_text().splitlines():
            if re.match(r"\w", line) and not line.startswith(("torch", "numpy")):
                assert re.fullmatch(r"[\w-]+==[\w.]+", line), line


def test_runtime_stages_install_nothing_of_the_build() -> None:
    for name in ("dependencies", "code", "runtime", "with-model"):
        text = " ".join(f"{word} {rest}" for word, rest in STAGES[name].steps)
        assert "requirements-build" not in text and "builder" not in text
        assert STAGES[name].base != "${BASE_DEVEL}"
        assert not re.search(r"\b(apt-get|curl|wget|git|ssh|gcc|build-essential)\b", text)
    copied = RUNTIME.all("COPY")
    assert copied == ["--from=dependencies /opt/venv /opt/venv", "--from=code /srv /srv"]
    assert not RUNTIME.all("RUN")  # each would be a layer that shows nothing of its own


def test_only_one_onnxruntime_may_be_installed() -> None:
    [command] = STAGES["dependencies"].all("RUN")
    assert " && /opt/venv/bin/python /tmp/check_wheels.py " in command.partition(" install ")[2]


def test_it_runs_as_a_user_by_number_on_one_port() -> None:
    assert RUNTIME.all("USER") == ["10001:10001"]
    assert STAGES["with-model"].all("USER") == []
    ports = [port for stage in STAGES.values() for port in stage.all("EXPOSE")]
    assert ports == [str(next(o.default for o in OPTIONS if o.name == "port"))]
    assert json.loads(RUNTIME.all("ENTRYPOINT")[0]) == ["python", "-m", "app"]
    assert not any(stage.all("CMD") for stage in STAGES.values())


def test_environment_reports_nothing_and_names_settings_that_exist() -> None:
    given = environment(RUNTIME)
    off = {"ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_OFFLINE"}
    assert {name: given[name] for name in off} == dict.fromkeys(off, "1")
    assert given["TOKENIZERS_PARALLELISM"] == "false"
    settings = {str(option.envvar) for option in OPTIONS}
    others = off | {"PATH", "HOME", "PYTHONDONTWRITEBYTECODE", "TOKENIZERS_PARALLELISM"}
    assert given.keys() <= settings | others


def test_no_secret_has_a_name_in_arguments_or_environment() -> None:
    named = [*ARGUMENTS, *(a for s in STAGES.values() for a in s.all("ARG") + s.all("ENV"))]
    assert not [name for name in named if SECRET.search(name)]
    [command] = [step for step in STAGES["builder"].all("RUN") if "hf_token" in step]
    assert "--mount=type=secret,id=hf_token" in command


def test_labels_tell_version_licence_and_base() -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', TEXT))
    project = (ROOT / "pyproject.toml").read_text()
    assert f'license = "{labels["licenses"]}"' in project
    assert (labels["version"], labels["base.name"]) == ("${VERSION}", "${BASE_RUNTIME}")
    assert labels.keys() >= {"title", "description", "revision"}


def test_only_what_every_builder_knows_is_used() -> None:
    """Debian's buildah builds no heredocs, COPY --link and --exclude, ADD --checksum."""
    assert not re.search(r"<<-?['\"]?[A-Z]|--link|--exclude|--checksum|--parents|^ADD ", TEXT, re.M)


# What the Dockerfile copies, and what nobody should get.
KEPT = ["app/api.py", "quantize/gate_text/english.txt", "requirements.txt", "LICENSE"]
LEFT_OUT = [
    *(".git/config", "models/default/model.onnx.data", "tests/live.py", ".venv/bin/python"),
    *("scripts/bench.py", "app/__pycache__/api.cpython-311.pyc", "deploy/compose.yaml"),
    *("docs/api.md", ".env", "token", "keys.json", ".ci/run"),
]


def is_ignored(path: str) -> bool:
    """The last line that names it or a folder above it decides, as Docker has it."""
    ignored = False
    above = ["/".join(path.split("/")[: n + 1]) for n in range(path.count("/") + 1)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.lstrip("!")
        if not line or line.startswith("#"):
            continue
        names = [part for name in above for part in (name, name.split("/")[-1])]
        wanted = names if pattern.startswith("**/") else above
        if any(fnmatch.fnmatchcase(name, pattern.removeprefix("**/")) for name in wanted):
            ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize("path", LEFT_OUT)
def test_context_leaves_out(path: str) -> None:
    assert is_ignored(path)


@pytest.mark.parametrize("path", KEPT)
def test_context_keeps(path: str) -> None:
    assert not is_ignored(path)
    assert (ROOT / path).is_file()


def test_everything_that_is_copied_is_in_the_context() -> None:
    for stage in STAGES.values():
        sources = [copy for copy in stage.all("COPY") if "--from" not in copy]
        bound = re.findall(r"type=bind,source=([^,\s]+)", " ".join(stage.all("RUN")))
        for name in [*bound, *(name for copy in sources for name in copy.split()[:-1])]:
            found = list(ROOT.glob(name))
            assert found, name
            assert not any(is_ignored(str(path.relative_to(ROOT))) for path in found), name


def healthcheck() -> list[str]:
    [text] = RUNTIME.all("HEALTHCHECK")
    command: list[str] = json.loads(text.partition(" CMD ")[2])
    assert command[0] == "python"
    return [sys.executable, *command[1:]]


def is_healthy(**environment: str) -> bool:
    done = subprocess.run(
        healthcheck(), env={**os.environ, "http_proxy": "http://127.0.0.1:9"} | environment
    )
    return done.returncode == 0


def test_healthcheck_asks_whether_the_server_is_ready(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with stub_server(tmp_path / "model", 2, LOAD_GATE=str(gate)) as server:
        port = str(urlsplit(server.url).port)
        assert not is_healthy(PORT=port)
        gate.touch()
        server.wait_ready()
        assert is_healthy(PORT=port)
        assert is_healthy(PORT="1", OPS_PORT=port)
        assert is_healthy(PORT=port, OPS_PORT="0")
    assert not is_healthy(PORT=port)


def distribution(folder: Path, name: str, *files: str) -> PathDistribution:
    """What pip leaves of an installation."""
    where = folder / f"{name}-1.dist-info"
    where.mkdir()
    (where / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (where / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return PathDistribution(where)


def test_wheels_check_tells_two_owners_of_onnxruntime_and_none(tmp_path: Path) -> None:
    torch = distribution(tmp_path, "torch", "torch/__init__.py")
    cpu = distribution(tmp_path, "onnxruntime", "onnxruntime/__init__.py")
    gpu = distribution(tmp_path, "onnxruntime-gpu", "onnxruntime/__init__.py")
    genai = distribution(tmp_path, "onnxruntime-genai", "onnxruntime_genai/__init__.py")
    assert not find_problems(find_owners([torch, gpu, genai]))
    [two] = find_problems(find_owners([torch, cpu, gpu]))
    assert "onnxruntime 1" in two and "onnxruntime-gpu 1" in two
    [none] = find_problems(find_owners([torch, genai]))
    assert none.startswith("onnxruntime comes from no distribution")


def test_wheels_check_tells_a_second_torch(tmp_path: Path) -> None:
    for name in ("base", "venv"):
        (tmp_path / name).mkdir()
    gpu = distribution(tmp_path, "onnxruntime-gpu", "onnxruntime/__init__.py")
    torches = [distribution(tmp_path / n, "torch", "torch/__init__.py") for n in ("base", "venv")]
    [problem] = find_problems(find_owners([gpu, *torches]))
    assert problem.startswith("torch comes from")


def test_compose_builds_a_target_with_arguments_that_exist() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    asked = compose["services"]["server"]["build"]
    assert asked["target"] in STAGES
    known = {arg.partition("=")[0] for stage in STAGES.values() for arg in stage.all("ARG")}
    assert asked["args"].keys() <= known
    assert (ROOT / asked["args"]["REQUIREMENTS"]).is_file()


def test_manifests_run_it_as_it_is_made() -> None:
    text = (ROOT / "deploy/k8s/base/deployment.yaml").read_text()
    [container] = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    assert container["command"] == json.loads(RUNTIME.all("ENTRYPOINT")[0])
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    model = next(entry["value"] for entry in container["env"] if entry["name"] == "MODEL_PATH")
    assert model == environment(RUNTIME)["MODEL_PATH"] and "/models" in paths
