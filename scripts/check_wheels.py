"""Is there one ONNX Runtime here, and one torch? Ends with status 1 where not. Needs no package.

    python scripts/check_wheels.py

The CPU and the GPU wheel own the same import name: the later one overwrites the earlier one's
files, and which of them then serves is a matter of luck. A second torch means that an image's own,
with its CUDA libraries, was not good enough for pip: gigabytes twice.
"""

import importlib.metadata
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import PurePosixPath

IMPORT_NAMES = ("onnxruntime", "torch")


def find_owners(distributions: Iterable[Distribution]) -> dict[str, list[str]]:
    """Who brings a file into the folder of each import name: "name version (where)"."""
    owners: dict[str, set[str]] = {name: set() for name in IMPORT_NAMES}
    for found in distributions:
        # A distribution that was installed by other means than a wheel may have no list of files.
        folders = {PurePosixPath(file).parts[0] for file in found.files or ()}
        for name in IMPORT_NAMES:
            if name in folders:
                where = found.locate_file("")
                owners[name].add(f"{found.metadata['Name']} {found.version} ({where})")
    return {name: sorted(by) for name, by in owners.items()}


def find_problems(owners: dict[str, list[str]]) -> list[str]:
    return [
        f"{name} comes from {' and '.join(by) if by else 'no distribution'}; exactly one may own it"
        for name, by in owners.items()
        if len(by) != 1
    ]


def main() -> int:
    owners = find_owners(importlib.metadata.distributions())
    for problem in (problems := find_problems(owners)):
        print(problem, file=sys.stderr)
    if not problems:
        print(", ".join(by for [by] in owners.values()))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
