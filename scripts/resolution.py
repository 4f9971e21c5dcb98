"""What a requirements file comes to on a platform, by `uv`: wheels and their sizes, not installed.

Asks the index in use; only wheels count, for no image has a compiler.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# glibc 2.31 is what llguidance's wheels want; 2.34 what onnxruntime-gpu's for aarch64 do.
X86 = "x86_64-manylinux_2_31"
ARM = "aarch64-manylinux_2_31"
ARM_GPU = "aarch64-manylinux_2_34"


class Unresolvable(Exception):
    """The index has not what the file asks for; the message is uv's."""


class Unreachable(Exception):
    """No index answers."""


@dataclass(frozen=True)
class Wheel:
    package: str
    version: str
    file: str
    num_bytes: int  # as it is downloaded


def resolve(requirements: Path, platform: str, *options: str, python: str = "3.11") -> list[Wheel]:
    """Raises Unresolvable, Unreachable."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "pylock.toml"
        command = [str(Path(sys.executable).parent / "uv"), "pip", "compile", str(requirements)]
        command += ["--format", "pylock.toml", "--output-file", str(output), "--quiet"]
        command += ["--python-platform", platform, "--python-version", python]
        command += ["--only-binary", ":all:", *options]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            # Of an index that answers uv says what is unsatisfiable, of none what failed.
            unsatisfiable = "unsatisfiable" in process.stderr or "not found in" in process.stderr
            raise (Unresolvable if unsatisfiable else Unreachable)(process.stderr.strip())
        packages = tomllib.loads(output.read_text())["packages"]
    return [_read_wheel(package) for package in packages]


def _read_wheel(package: dict) -> Wheel:  # type: ignore[type-arg]
    wheel = package["wheels"][0]
    file = wheel.get("name") or wheel["url"].rsplit("/", 1)[1]
    return Wheel(package["name"], package["version"], file, wheel.get("size", 0))
