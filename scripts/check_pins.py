"""Does every version that is pinned here exist, as a wheel for its platform, and fit the rest?

    python scripts/check_pins.py            needs uv (requirements-dev.txt) and the package index

Each requirements file is resolved for its platform; then each `name==version` that a Dockerfile or
the Makefile has. Tags of base images are not looked up: that takes their registry. Status 1 where
something is missing.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from resolution import ARM, ARM_GPU, ROOT, X86, Unresolvable, resolve

PIN = re.compile(r"\b([A-Za-z][\w.-]*)==(\d[\w.]*)")
# File -> platforms, options. Those with --no-deps are complete as they are, or apart from the rest.
FILES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "requirements-cpu.txt": ((X86, ARM), ()),
    "requirements-gpu.txt": ((X86,), ()),
    "requirements-slim.txt": ((X86,), ("--no-deps",)),
    "requirements-arm64.txt": ((ARM,), ()),
    "requirements-grace.txt": ((ARM_GPU,), ()),
    "requirements-build.txt": ((X86, ARM), ("--no-deps",)),
    "requirements-tracing.txt": ((X86, ARM), ()),
    "requirements-dev.txt": ((X86,), ()),
    "requirements-lint.txt": ((X86,), ()),
}
INCLUDED = ("requirements.txt",)  # by others
PLACES = ("Makefile", ".ci/run", "Dockerfile*")


def find_other_pins(root: Path = ROOT) -> dict[str, list[str]]:
    """ "name==version" -> the files outside of the requirements that have it."""
    found: dict[str, list[str]] = {}
    for file in sorted(file for place in PLACES for file in root.glob(place)):
        for pin in sorted({match[0] for match in PIN.finditer(file.read_text())}):
            found.setdefault(pin, []).append(file.name)
    return found


def check(file: Path, platform: str, *options: str) -> str | None:
    """What is wrong, if anything. Raises Unreachable."""
    try:
        wheels = resolve(file, platform, *options)
    except Unresolvable as error:
        return str(error)
    print(f"{file.name} for {platform}: {len(wheels)} wheels")
    return None


def main() -> int:
    problems = []
    unknown = {file.name for file in ROOT.glob("requirements*.txt")} - {*FILES, *INCLUDED}
    if unknown:
        problems.append(f"not in this script's table: {', '.join(sorted(unknown))}")
    for name, (platforms, options) in FILES.items():
        for platform in platforms:
            if problem := check(ROOT / name, platform, *options):
                problems.append(f"{name} for {platform}: {problem}")
    with tempfile.TemporaryDirectory() as folder:
        for pin, files in find_other_pins().items():
            file = Path(folder) / "pin.txt"
            file.write_text(pin + "\n")
            if problem := check(file, X86, "--no-deps"):
                problems.append(f"{pin} in {', '.join(files)}: {problem}")
    print(*problems, sep="\n", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
