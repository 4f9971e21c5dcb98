"""Which files a model was loaded from: tells whether a folder, or a link to one, has changed since.

Reads no contents: a file that is another by name, size, time or inode is taken for another.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_DEPTH = 2  # the folder and those in it: some exports keep the graph in one


@dataclass(frozen=True, slots=True)
class Origin:
    folder: Path  # behind all links
    files: frozenset[tuple[str, int, int, int]]  # name, bytes, nanoseconds of change, inode


def read_origin(path: Path) -> Origin:
    """Of what lies at `path` now; without files if it is no folder that can be read."""
    try:
        folder = path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, say: the load will tell
        return Origin(path, frozenset())
    return Origin(folder, frozenset(_files(folder, "", _DEPTH)))


def _files(folder: Path, prefix: str, depth: int) -> list[tuple[str, int, int, int]]:
    found = []
    try:
        for entry in os.scandir(folder):
            name = prefix + entry.name
            if entry.is_file():
                stat = entry.stat()
                found.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
            elif depth > 1 and entry.is_dir():
                found += _files(Path(entry.path), name + "/", depth - 1)
    except OSError:  # it goes away meanwhile, or was never there: the load will tell
        pass
    return found
