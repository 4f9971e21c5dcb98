"""What counts as another model at the same place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from app.origin import read_origin


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "v1"
    (folder / "onnx").mkdir(parents=True)
    (folder / "onnx" / "model.onnx").write_text("graph")
    (folder / "config.json").write_text("{}")
    return folder


def replace_by_its_like(folder: Path) -> None:
    """Of the same time, too."""
    old, new = folder / "config.json", folder.parent / "new"
    new.write_text("{}")
    times = old.stat()
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    new.replace(old)


def touch(folder: Path) -> None:
    """By as little as can be told."""
    times = (folder / "config.json").stat()
    os.utime(folder / "config.json", ns=(times.st_atime_ns, times.st_mtime_ns + 1))


def test_same_files_are_the_same_model_by_whatever_path(folder: Path) -> None:
    link = folder.with_name("current")
    link.symlink_to(folder)
    assert read_origin(link) == read_origin(folder / "onnx" / "..") == read_origin(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "onnx" / "model.onnx").write_text("longer"),
        lambda folder: (folder / "tokenizer.json").touch(),
        lambda folder: (folder / "config.json").unlink(),
        replace_by_its_like,
        touch,
    ],
    ids=["size", "one more", "one less", "inode", "time"],
)
def test_changed_file_makes_another(folder: Path, change: Callable[[Path], object]) -> None:
    before = read_origin(folder)
    change(folder)
    assert read_origin(folder) != before


def test_link_that_leads_elsewhere_makes_another(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(folder)
    before = read_origin(link)
    other = folder.rename(tmp_path / "v2")
    link.unlink()
    link.symlink_to(other)
    assert read_origin(link) != before


@pytest.mark.parametrize("name", ["nowhere", "loop", "a\0b", "file"])
def test_what_is_no_folder_has_no_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    assert read_origin(tmp_path / name).files == frozenset()
