"""Does ONNX Runtime's CUDA provider find all it needs in torch's CUDA libraries? Without a GPU.

    python scripts/check_gpu_links.py [--json FILE]        # downloads the wheels: about 2.9 GB
    python scripts/check_gpu_links.py --site FOLDER        # an installation, say of an image

1. Each library is read with `readelf`: every NEEDED one must be in the wheels or the system (only
   the driver's may be missing), and every symbol that is not weak be defined by one of those, with
   its version.
2. The loader itself is asked (LD_BIND_NOW: every symbol at once), with the server's own functions
   (`app/cuda.py`). Wants the Python version that the wheels are for, and what onnxruntime imports.

The wheels are torch and onnxruntime-gpu of requirements-slim.txt, and the `nvidia-*` ones that
torch asks for. What was downloaded is deleted at the end. The last line on stdout is JSON;
status 1: something is missing.
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
from linker import Linker, check, find_system, newest_versions

ROOT = Path(__file__).resolve().parent.parent
PROVIDER = "libonnxruntime_providers_cuda.so"
# Not used by the server; wants TensorRT, which no wheel here brings.
UNUSED = ("libonnxruntime_providers_tensorrt.so",)
LOAD = """
import json, sys
import torch, onnxruntime
from app import cuda
cuda.load_libraries()
problem = cuda.find_unloadable()
maps = sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line})
site = sys.argv[1] + "/"
print(json.dumps({"torch": torch.__version__, "onnxruntime": onnxruntime.__version__,
    "providers": onnxruntime.get_available_providers(), "problem": problem,
    "mapped": [path.removeprefix(site) for path in maps if path.startswith(site)]}))
"""


def read_pins() -> list[str]:
    lines = (ROOT / "requirements-slim.txt").read_text().splitlines()
    return [line for line in lines if re.match(r"(torch|onnxruntime-gpu)==", line)]


def read_cuda_pins(site: Path) -> list[str]:
    """The `nvidia-*` wheels that the torch of folder `site` asks for."""
    [metadata] = site.glob("torch-*.dist-info/METADATA")
    asked = re.findall(
        r"^Requires-Dist: (nvidia-[\w-]+) ?\(?(==[\w.]+)", metadata.read_text(), re.M
    )
    return [name + version for name, version in asked]


def download(folder: Path) -> list[dict[str, Any]]:
    """Each wheel's name and bytes; what is in them lies under `folder`/site then."""
    site = folder / "site"
    listed = _download(read_pins(), folder / "wheels", site)
    return listed + _download(read_cuda_pins(site), folder / "wheels", site)


def _download(pins: list[str], wheels: Path, site: Path) -> list[dict[str, Any]]:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--only-binary", ":all:", "-d", str(wheels), *pins], check=True)
    listed = []
    for wheel in sorted(wheels.iterdir()):
        listed.append({"wheel": wheel.name, "bytes": wheel.stat().st_size})
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
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


def load(site: Path) -> dict[str, Any]:
    environment = {**os.environ, "LD_BIND_NOW": "1", "ORT_DISABLE_TELEMETRY": "1"}
    environment["PYTHONPATH"] = f"{site}:{ROOT}"
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
    brought = {name for entry in checked for name in entry["brings"]}
    return {
        "date": datetime.date.today().isoformat(),
        "python": ".".join(map(str, sys.version_info[:2])),
        # What the base image has to have: libraries, and their newest versions that are asked for.
        "base_libraries": sorted(brought - set(wheels)),
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
