"""Writes aside, renames at the end: a model folder is whole or absent, whatever interrupts."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from .errors import QuantizeError
from .hashes import RECORD_FILE


class Workplace:
    """A scratch folder beside `output` that `publish` turns into it.

    `cache` outlives the run (downloads); `scratch`, and the `folder` in it unless published, do
    not. One run at a time works on an output; what a killed run left is removed by the next.
    Only a model folder of ours, or an empty one, is ever replaced.
    Raises QuantizeError if `output` exists and is not to be replaced, or another run is at work.
    """

    def __init__(self, output: Path, *, replace: bool = False) -> None:
        output = output.resolve()
        self._output = output
        self._replace = replace
        self.cache = output.parent / ".cache"
        self.scratch = output.parent / f".{output.name}.partial"
        self.folder = self.scratch / "folder"

    def __enter__(self) -> Workplace:
        if self._output.exists() and not self._replace:
            raise QuantizeError(f"{self._output} exists already; --force replaces it")
        if self._output.exists() and not _is_ours(self._output):
            raise QuantizeError(
                f"{self._output} holds something else than a model folder of this tool "
                f"({RECORD_FILE} is missing): it is not replaced"
            )
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            self._lock = (self.cache / f"{self._output.name}.lock").open("w")
        except OSError as error:
            raise QuantizeError(f"cannot write to {self._output.parent}: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise QuantizeError(f"another run is building {self._output}") from None
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def publish(self) -> None:
        # ONNX writes data files for their owner only, and a umask may ask for that; but the server
        # is often another user.
        self.folder.chmod(0o755)
        for path in self.folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        replaced = self.scratch / "replaced"
        if self._output.exists():
            os.replace(self._output, replaced)
        try:
            os.replace(self.folder, self._output)
        except OSError:
            if replaced.exists():
                os.replace(replaced, self._output)
            raise

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._lock.close()


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and (
        (folder / RECORD_FILE).is_file() or next(folder.iterdir(), None) is None
    )
