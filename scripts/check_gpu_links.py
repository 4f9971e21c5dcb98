"""Does ONNX Runtime's CUDA provider find all it needs in torch's CUDA libraries? Without a GPU.

    python scripts/check_gpu_links.py [--json FILE]        # downloads the wheels: about 2.8 GB
    python scripts/check_gpu_links.py --site FOLDER        # an installation, say of an image

1. Each library is read with `readelf`: every NEEDED one must be in the wheels or the system (only the
   driver's may be missing), and every symbol that is not weak be defined by one of those, with its
   version.
2. The loader itself is asked (LD_BIND_NOW: every symbol at once), with the server's own functions
   (`app/cuda.py`). Wants the Python version that the wheels are for, and what onnxruntime imports.

The wheels are those of requirements-slim.txt, which are torch 2.6.0's own but for what is left out
there. What was downloaded is deleted at the end. The last line on stdout is JSON; status 1: something
is missing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from elf import Library, read_library

ROOT = Path(__file__).resolve().parent.parent
PROVIDER = "libonnxruntime_providers_cuda.so"
# Loaded by ONNX Runtime before the provider, which does not name it.
LOADED_BEFORE = {PROVIDER: ["libonnxruntime_providers_shared.so"]}
# Not used by the server; wants TensorRT, which no wheel here brings.
UNUSED = ("libonnxruntime_providers_tensorrt.so",)
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
LOAD = """
import json, sys
import torch, onnxruntime
from app import cuda
cuda.load_libraries()
problem = cuda.find_unloadable()
maps = sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line})
print(json.dumps({"torch": torch.__version__, "onnxruntime": onnxruntime.__version__,
    "providers": onnxruntime.get_available_providers(), "problem": problem,
    "mapped": [path.removeprefix(sys.argv[1] + "/") for path in maps if path.startswith(sys.argv[1])]}))
"""


def read_pins() -> list[str]:
    lines = (ROOT / "requirements-slim.txt").read_text().splitlines()
    return [line for line in lines if re.match(r"(torch|onnxruntime-gpu|nvidia-.*-cu12)==", line)]


def download(folder: Path) -> list[dict[str, Any]]:
    """Each wheel's name and bytes; its libraries lie under `folder`/site then."""
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--only-binary", ":all:", "-d", str(wheels), *read_pins()], check=True)
    listed = []
    for wheel in sorted(wheels.iterdir()):
        listed.append({"wheel": wheel.name, "bytes": wheel.stat().st_size})
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
        wheel.unlink()
    return listed


def find_libraries(site: Path) -> dict[str, Library]:
    """By soname, of the folders that CUDA and those on it come in. Not Python's own modules."""
    found: dict[str, Library] = {}
    for path in sorted(site.glob("*/**/*.so*")):
        top = path.relative_to(site).parts[0]
        if top not in ("nvidia", "cusparselt", "torch", "onnxruntime") or ".cpython-" in path.name:
            continue
        if path.is_file() and not path.is_symlink() and path.name != "libtorch_python.so":
            library = read_library(path)
            # The loader knows a library by the name of its file, and by its own, which may differ.
            found[path.name] = found[library.soname] = library
    return found


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


def newest_versions(libraries: list[Library]) -> dict[str, str]:
    """Of glibc and libstdc++, what is asked for."""
    newest: dict[str, tuple[int, ...]] = {}
    for library in libraries:
        for _, version in library.undefined:
            if found := re.fullmatch(r"(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", version):
                number = tuple(int(part) for part in found[2].split("."))
                newest[found[1]] = max(newest.get(found[1], ()), number)
    return {name: ".".join(map(str, number)) for name, number in sorted(newest.items())}


def load(site: Path) -> dict[str, Any]:
    path = f"{site}:{ROOT}"
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "LD_BIND_NOW": "1",
        "ORT_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-c", LOAD, str(site)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        return {"problem": process.stderr.strip().splitlines()[-1]}
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


def report(site: Path) -> dict[str, Any]:
    wheels = find_libraries(site)
    linker = Linker(wheels, find_system())
    distinct = {library.path: library for library in wheels.values()}.values()
    used = [library for library in distinct if library.soname not in UNUSED]
    checked = [check(library, linker) for library in used]
    return {
        "date": datetime.date.today().isoformat(),
        "python": ".".join(map(str, sys.version_info[:2])),
        # What the base image has to have: libraries, and their newest versions that are asked for.
        "base_libraries": sorted(
            {name for entry in checked for name in entry["brings"]} - set(wheels)
        ),
        "base_versions": newest_versions(used),
        "load": load(site),
        "libraries": checked,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", type=Path, help="a site-packages folder, instead of a download")
    parser.add_argument("--json", type=Path, help="also written there, indented")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        listed = [] if options.site else download(Path(name))
        found = {"wheels": listed, **report((options.site or Path(name) / "site").resolve())}
    bad = [entry for entry in found["libraries"] if entry["missing"] or entry["unresolved"]]
    for entry in bad:
        print(entry["library"], "lacks", *entry["missing"], *entry["unresolved"][:10])
    if PROVIDER not in [entry["library"] for entry in found["libraries"]]:
        bad.append({"library": PROVIDER})
        print(f"{PROVIDER} is not there")
    if problem := found["load"]["problem"]:
        print("the loader says:", problem)
    found["linked"] = not bad and not problem
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: found[key] for key in ("date", "linked", "base_versions", "load")}))
    return 0 if found["linked"] else 1


if __name__ == "__main__":
    sys.exit(main())
