"""How large the images are in wheels: as they are downloaded, which is about what a compressed
layer takes, and as they are installed.

    python scripts/image_size.py                 # from the index alone: nothing is downloaded
    python scripts/image_size.py --wheels DIR    # installed sizes of the wheels that lie there
    python scripts/image_size.py --download      # all of them, 3.5 GB, one at a time

A wheel's installed size is that of the files in it, without bytecode. Sizes of base images are not
looked up. Takes uv (requirements-dev.txt). The last line on stdout is JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from resolution import ARM, ROOT, X86, Wheel, resolve

# What ONNX Runtime's CUDA provider loads, were there no torch (docs/small-images.md).
OWN_CUDA = re.compile(r"nvidia-(cublas|cudnn|cufft|curand|cuda-runtime|cuda-nvrtc|nvjitlink)-cu12$")
BASE_TORCH = re.compile(r"(torch|triton|nvidia-.*-cu12)$")


def is_without_torch(wheel: Wheel) -> bool:
    return bool(OWN_CUDA.match(wheel.package)) or not BASE_TORCH.match(wheel.package)


def is_on_base(wheel: Wheel) -> bool:
    return not BASE_TORCH.match(wheel.package)


def resolve_images() -> dict[str, list[Wheel]]:
    slim = resolve(ROOT / "requirements-slim.txt", X86, "--no-deps")
    return {
        "Dockerfile, on a base that has torch": [wheel for wheel in slim if is_on_base(wheel)],
        "Dockerfile.slim": slim,
        "Dockerfile.slim, were there no torch": [
            wheel for wheel in slim if is_without_torch(wheel)
        ],
        "Dockerfile.arm64": resolve(ROOT / "requirements-arm64.txt", ARM),
    }


def installed_bytes(wheel: Path) -> int:
    with zipfile.ZipFile(wheel) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def fetch(wheel: Wheel) -> int:
    """Downloads it, for whatever platform it is, and deletes it again; its installed bytes."""
    platforms = wheel.file.removesuffix(".whl").rsplit("-", 1)[1].split(".")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary", ":all:", "--python-version", "3.11"]
    pip += [option for platform in platforms for option in ("--platform", platform)]
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        subprocess.run([*pip, "-d", folder, f"{wheel.package}=={wheel.version}"], check=True)
        [file] = Path(folder).iterdir()
        return installed_bytes(file)


def measure(wheels: Iterable[Wheel], folder: Path | None, is_fetched: bool) -> dict[str, int]:
    """Installed bytes by file, of those that lie in `folder` or are fetched."""
    sizes: dict[str, int] = {}
    for wheel in sorted(set(wheels), key=lambda wheel: -wheel.num_bytes):
        if folder is not None and (folder / wheel.file).exists():
            sizes[wheel.file] = installed_bytes(folder / wheel.file)
        elif is_fetched:
            sizes[wheel.file] = fetch(wheel)
    return sizes


def summarize(wheels: list[Wheel], installed: dict[str, int]) -> dict[str, Any]:
    known = [installed.get(wheel.file) for wheel in wheels]
    total = None if None in known else sum(size for size in known if size is not None)
    largest = sorted(wheels, key=lambda wheel: -wheel.num_bytes)[:8]
    return {
        "wheels": len(wheels),
        "compressed_bytes": sum(wheel.num_bytes for wheel in wheels),
        "installed_bytes": total,
        "largest": {
            f"{wheel.package} {wheel.version}": [wheel.num_bytes, installed.get(wheel.file)]
            for wheel in largest
        },
    }


def megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.0f}"


@click.command(help=__doc__, context_settings={"max_content_width": 100})
@click.option("--wheels", type=click.Path(path_type=Path), help="Folder of wheels.")
@click.option("--download", is_flag=True, help="What is not there, one at a time.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="Also written there.")
def main(wheels: Path | None, download: bool, output: Path | None) -> None:
    images = resolve_images()
    installed = measure((wheel for each in images.values() for wheel in each), wheels, download)
    found = {name: summarize(each, installed) for name, each in images.items()}
    print("| wheels of | number | compressed, MB | installed, MB |\n| --- | --- | --- | --- |")
    for name, summary in found.items():
        sizes = (summary["compressed_bytes"], summary["installed_bytes"])
        print(f"| {name} | {summary['wheels']} | {megabytes(sizes[0])} | {megabytes(sizes[1])} |")
    report = {"date": datetime.date.today().isoformat(), "images": found}
    if output:
        output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
