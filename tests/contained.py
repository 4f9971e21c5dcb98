"""A command as a container runs it: no user of that name, nothing writable but one folder, no
network but loopback. Made of namespaces, which only root may open; each test skips without them.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UID = 12345
MODEL = "/mnt/model"
TEMP = "/mnt/temp"

# Everything is bound read-only, in this namespace alone; the interpreter may lie in somebody's
# home, which is then replaced by an empty folder with nothing but the interpreter.
_SCRIPT = """
set -e
ip link set lo up
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir -m 755 /mnt/model /mnt/temp /mnt/python
mount --bind "$MODEL" /mnt/model
mount -t tmpfs -o mode=1777 tmpfs /mnt/temp
if [ -n "$PRIVATE" ]; then
  mount --bind "$PREFIX" /mnt/python
  mount -t tmpfs -o mode=755 tmpfs "$PRIVATE"
  mkdir -p "$PREFIX"
  mount --bind /mnt/python "$PREFIX"
fi
while read -r _ target type _; do
  case "$type:$target" in
    proc:*|sysfs:*|cgroup*:*|devtmpfs:*|devpts:*|tmpfs:/mnt/temp) ;;
    *) [ ! -e "$target" ] || mount -o remount,ro,bind "$target" ;;
  esac
done < /proc/self/mounts
exec setpriv --reuid $ID --regid $ID --clear-groups env -i TMPDIR=/mnt/temp "$@"
"""


def contained(model: Path, *command: str) -> list[str]:
    """`command` there, as user `UID`; it sees `model` at `MODEL`, and may write in `TEMP`."""
    settings = {
        "MODEL": str(model.resolve()),
        "ID": str(UID),
        "PREFIX": sys.base_prefix,
        "PRIVATE": str(_private_folder(Path(sys.base_prefix)) or ""),
    }
    given = [f"{name}={value}" for name, value in settings.items()]
    return ["env", *given, *_NAMESPACES, "sh", "-c", _SCRIPT, "contained", *command]


def skip_without_namespaces() -> None:
    if reason := _why_none():
        pytest.skip(reason)


def as_first_process(*command: str) -> list[str]:
    """`command` as a container's first process, which no signal ends that it does not ask for."""
    return [*_FIRST, *command]


def skip_without_process_namespaces() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("process namespaces need root and unshare")
    tried = subprocess.run(as_first_process("/bin/true"), capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"process namespaces cannot be made here: {tried.stderr.strip()}")


_FIRST = ("unshare", "--pid", "--fork", "--kill-child")
_NAMESPACES = ("unshare", "--net", "--mount")


@functools.cache
def _why_none() -> str:
    if os.geteuid() != 0:
        return "only root may make namespaces with another user"
    for tool in ("unshare", "setpriv", "ip"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    tried = subprocess.run(
        contained(Path("/"), "/bin/true"), capture_output=True, text=True, timeout=60
    )
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


def _private_folder(path: Path) -> Path | None:
    """The first folder on the way to `path` that others may not enter."""
    for folder in [*reversed(path.parents), path]:
        if not folder.stat().st_mode & 0o001:
            return folder
    return None
