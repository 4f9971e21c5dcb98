"""Install a real Triton Inference Server for the CPU, out of NVIDIA's PyPI wheel of pytriton.

    python scripts/install_triton.py [DEST]        default: .venv-triton

DEST becomes a virtual environment that holds the server, its python backend and numpy 1.26 (numpy 2
breaks this version's stub), and behind these the packages of the Python that runs this. Then

    DEST/tritonserver --model-repository REPOSITORY [--http-port … --grpc-port … --metrics-port …]

runs it. What is there already is kept; nothing outside DEST is written, but for Debian's libpython
where this Python has no shared library. Always start it with a time limit: a model folder without
its model.py hangs the start.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEEL = "nvidia-pytriton==0.7.0"  # tritonserver 2.51
NUMPY = "numpy==1.26.4"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBPYTHON = f"libpython{PYTHON}.so.1.0"
DEFAULT = Path(os.environ.get("TRITON_DIR", ROOT / ".venv-triton"))

# The stub takes its packages from the first python3 on the PATH; PYTHONPATH it does not read.
LAUNCHER = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
server="$here/lib/python{python}/site-packages/pytriton/tritonserver"
export PATH="$here/bin:$PATH" LD_LIBRARY_PATH="$here/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
exec "$server/bin/tritonserver" --backend-directory="$server/backends" \\
  --allow-gpu-metrics=false "$@"
"""


class CannotInstall(Exception):
    """The message says what is missing."""


def install(dest: Path = DEFAULT) -> Path:
    """The program that starts the server. Raises CannotInstall."""
    dest.mkdir(parents=True, exist_ok=True)
    with (dest / ".lock").open("w") as lock:  # another process may be at it
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, packages = dest / ".installed", sysconfig.get_path("purelib")
        recipe = "\n".join([WHEEL, NUMPY, PYTHON, packages, LAUNCHER])
        if not stamp.exists() or stamp.read_text() != recipe:
            stamp.unlink(missing_ok=True)
            _check_machine()
            _make_venv(dest)
            _add_libpython(dest)
            _add_packages(dest, packages)
            _write_launcher(dest)
            stamp.write_text(recipe)  # last: an interrupted installation is taken up again
    return dest / "tritonserver"


def _check_machine() -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise CannotInstall(f"{WHEEL} is for x86_64 Linux, this is {platform.platform()}")


def _make_venv(dest: Path) -> None:
    if not (dest / "bin" / "python3").exists():
        _run("a virtual environment", sys.executable, "-m", "venv", str(dest))
    pip = [str(dest / "bin" / "python3"), "-m", "pip", "install", "--quiet", "--retries", "2"]
    _run(WHEEL, *pip, "--disable-pip-version-check", "--no-deps", WHEEL, NUMPY)
    server = _site_packages(dest) / "pytriton" / "tritonserver"
    stub = server / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    if not stub.exists():
        raise CannotInstall(f"{WHEEL} has no stub for Python {PYTHON}")
    target = server / "backends" / "python" / stub.name
    target.unlink(missing_ok=True)  # one that runs cannot be written to
    shutil.copy(stub, target)
    for program in (target, server / "bin" / "tritonserver"):
        program.chmod(0o755)


def _add_libpython(dest: Path) -> None:
    """This Python's own, if it has one: its modules are of the same version then."""
    own = Path(sysconfig.get_config_var("LIBDIR")) / LIBPYTHON
    link = dest / "lib" / LIBPYTHON
    link.unlink(missing_ok=True)
    if own.exists():
        link.symlink_to(own)
        return
    if _is_known(LIBPYTHON):
        return
    package = f"libpython{PYTHON}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotInstall(f"{LIBPYTHON} is missing: install Debian's {package}")
    _run("Debian's package lists", "apt-get", "update", "-qq")
    apt = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", package]
    _run(f"Debian's {package}", *apt, DEBIAN_FRONTEND="noninteractive")


def _is_known(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _add_packages(dest: Path, packages: str) -> None:
    """Behind its own, so that numpy 1.26 comes first."""
    (_site_packages(dest) / "packages.pth").write_text(packages + "\n")


def _write_launcher(dest: Path) -> None:
    launcher = dest / "tritonserver"
    launcher.write_text(LAUNCHER.format(python=PYTHON))
    launcher.chmod(0o755)


def _site_packages(dest: Path) -> Path:
    return dest / "lib" / f"python{PYTHON}" / "site-packages"


def _run(what: str, *command: str, **environment: str) -> None:
    run = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    if run.returncode != 0:
        told = (run.stderr or run.stdout).strip().splitlines()[-1:]
        raise CannotInstall(f"{what} cannot be installed: {' '.join(told)}")


def main() -> None:
    dest = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    try:
        print(install(dest.absolute()))
    except CannotInstall as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
