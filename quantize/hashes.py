"""Sizes and SHA-256 of a folder's files: written into `quantization.json`, compared by `check`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypedDict

RECORD_FILE = "quantization.json"


class FileEntry(TypedDict):
    bytes: int
    sha256: str


def file_table(folder: Path) -> dict[str, FileEntry]:
    """Every file of `folder` but the record itself, by its name relative to the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): FileEntry(
            bytes=path.stat().st_size, sha256=sha256(path)
        )
        for path in files
        if path != folder / RECORD_FILE
    }


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
