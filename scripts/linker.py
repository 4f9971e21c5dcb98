"""Resolves libraries and symbols from what `elf.py` has read, as the loader would; loads nothing.

Wherever a library lies among the wheels it counts as found: onnxruntime.preload_dlls and torch load
them from there. Search paths are not looked at.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from elf import Library, read_library

# Loaded by ONNX Runtime before the provider, which does not name it.
LOADED_BEFORE = {"libonnxruntime_providers_cuda.so": ["libonnxruntime_providers_shared.so"]}
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")


def find_system() -> dict[str, Path]:
    """The 64-bit libraries that the loader knows by itself."""
    lines = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout.splitlines()
    pairs = [line.strip().split(" => ") for line in lines if "x86-64" in line]
    return {name.split(" ")[0]: Path(path) for name, path in pairs}


class Linker:
    """Resolves as the loader would once ONNX Runtime has loaded the wheels' libraries."""

    def __init__(self, wheels: dict[str, Library], system: dict[str, Path]) -> None:
        self._wheels = wheels
        self._system = system
        self._read: dict[str, Library] = {}

    def find(self, soname: str) -> Library | None:
        if soname in self._wheels:
            return self._wheels[soname]
        if soname in self._system and soname not in self._read:
            self._read[soname] = read_library(self._system[soname])
        return self._read.get(soname)

    def reachable(self, library: Library) -> tuple[list[Library], list[str]]:
        """What `library` brings with it, itself first, and the sonames that nobody has."""
        reached = {library.soname: library}
        missing = []
        names = [*library.needed, *LOADED_BEFORE.get(library.soname, [])]
        while names:
            name = names.pop(0)
            if name in reached or name in missing:
                continue
            if (found := self.find(name)) is None:
                missing.append(name)
            else:
                reached[name] = found
                names += found.needed
        return list(reached.values()), missing


def check(library: Library, linker: Linker) -> dict[str, Any]:
    reached, missing = linker.reachable(library)
    driver = [name for name in missing if name in DRIVER]
    defined = {symbol for other in reached for symbol in other.defined}
    names = {name for name, _ in defined}
    unversioned = {name for name, version in defined if not version}
    unresolved = sorted(
        f"{name}@{version}" if version else name
        for name, version in library.undefined
        # A definition without a version serves any; a reference without one takes any.
        if not ((name, version) in defined or name in (unversioned if version else names))
    )
    return {
        "library": library.soname,
        "brings": sorted(other.soname for other in reached[1:]),
        "missing": [name for name in missing if name not in DRIVER],
        "driver": driver,
        "symbols": len(library.undefined),
        # Those of a library that only the driver has cannot be told from others that are missing.
        "unresolved": [] if driver else unresolved,
    }


def newest_versions(libraries: Iterable[Library]) -> dict[str, str]:
    """Of glibc and libstdc++, what is asked for."""
    newest: dict[str, tuple[int, ...]] = {}
    for library in libraries:
        for _, version in library.undefined:
            if found := re.fullmatch(r"(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", version):
                number = tuple(int(part) for part in found[2].split("."))
                newest[found[1]] = max(newest.get(found[1], ()), number)
    return {name: ".".join(map(str, number)) for name, number in sorted(newest.items())}
