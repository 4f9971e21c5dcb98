"""The manifests of deploy/k8s as kustomize builds them, with the kubectl of the environment."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .live import ROOT

K8S = ROOT / "deploy" / "k8s"
OVERLAYS = sorted(folder.name for folder in (K8S / "overlays").iterdir())
BUILDS = ["base", *(f"overlays/{name}" for name in OVERLAYS)]
_KUBECTL = Path(sys.executable).parent / "kubectl"

Manifest = dict[str, Any]


def build(folder: Path) -> list[Manifest]:
    command = [str(_KUBECTL), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # of what is out of date
    return list(yaml.safe_load_all(done.stdout))


@cache
def built(name: str) -> list[Manifest]:
    """`base`, or an overlay by its path in deploy/k8s. Not to be changed."""
    return build(K8S / name)


def part(parts: list[Manifest], kind: str) -> Manifest:
    """The only one of its kind."""
    [found] = [each for each in parts if each["kind"] == kind]
    return found


def pod_of(parts: list[Manifest]) -> Manifest:
    spec: Manifest = part(parts, "Deployment")["spec"]["template"]["spec"]
    return spec


def env_of(container: Manifest) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def read(path: str) -> Any:
    """A file of deploy/k8s that kustomize does not build."""
    return yaml.safe_load((K8S / path).read_text())
