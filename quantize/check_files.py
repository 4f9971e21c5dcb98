"""The part of `check` about files: whole, unchanged, inside the folder, and none left over."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path, PurePosixPath
from typing import Any

import onnx

from .errors import QuantizeError
from .external_data import ExternalTensor, external_tensors, file_problem
from .graph_file import load_graph
from .hashes import RECORD_FILE, sha256
from .model_folder import GENAI_FILE, ModelFolder
from .report import Report

# What comes with a model without being named by anything.
_KNOWN = {
    *("config.json", "generation_config.json", GENAI_FILE, RECORD_FILE, "ort_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
}
_KNOWN_PREFIXES = ("README", "LICENSE", "LICENCE", "NOTICE", "additional_chat_templates/", ".")
_KNOWN_SUFFIXES = (".md", ".py")  # .py: config.json may name them; they are never run


def read_graph(graph: Path, report: Report) -> onnx.ModelProto | None:
    """The graph without its weights."""
    try:
        return load_graph(graph)
    except QuantizeError as error:
        report.error("graph", str(error), graph.name)
        return None


def check_weights(folder: ModelFolder, model: onnx.ModelProto, report: Report) -> set[str]:
    """Every data file that the graph names is there and long enough; returns their names."""
    assert folder.graph is not None
    try:
        tensors = external_tensors(model)
    except QuantizeError as error:
        report.error("weights", str(error), folder.graph.name)
        return set()
    by_location: defaultdict[str, list[ExternalTensor]] = defaultdict(list)
    for tensor in tensors:
        by_location[tensor.location].append(tensor)
        if tensor.problem is not None:
            report.error("weights", tensor.problem, tensor.location)
    for location, parts in by_location.items():
        _check_data_file(folder.path, location, parts, report)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    if tensors and not any(report.blames(location) for location in by_location):
        where = ", ".join(sorted(by_location))
        report.ok("weights", f"{len(tensors)} tensors, {num_bytes / 1e6:,.1f} MB, in {where}")
    if not tensors:
        report.ok("weights", f"all inside {folder.graph.name}")
    return {os.path.normpath(location) for location in by_location}


def _check_data_file(
    folder: Path, location: str, parts: list[ExternalTensor], report: Report
) -> None:
    needed = max(part.end for part in parts)
    path = folder / location
    if problem := file_problem(folder, location, needed):
        hint = "" if path.exists() else _looks_renamed(folder, needed)
        report.error("weights", problem + hint, location)
    elif not path.resolve().is_relative_to(folder.resolve()):
        text = f"data file {location} is a link to outside of the folder: a copy must follow it"
        report.warning("weights", text, location)


def _looks_renamed(folder: Path, num_bytes: int) -> str:
    same = [
        path.name
        for path in sorted(folder.iterdir())
        if path.is_file() and path.stat().st_size == num_bytes
    ]
    return f". {same[0]} has just that size: was it renamed?" if same else ""


def check_table(folder: ModelFolder, report: Report, *, fast: bool) -> set[str]:
    """Sizes and hashes against `quantization.json`; returns the names in it."""
    table = folder.record.get("files")
    if not isinstance(table, dict) or not table:
        if not report.blames(RECORD_FILE):
            what = f"{RECORD_FILE} has no hashes" if folder.record else f"there is no {RECORD_FILE}"
            report.warning("hashes", f"{what}: a changed file cannot be told")
        return set()
    before = report.count("error")
    for name, entry in table.items():
        if _is_outside(name):
            text = f"{RECORD_FILE} names {name}, which lies outside of the folder"
            report.error("hashes", text, RECORD_FILE)
        elif not report.blames(name):
            _check_entry(folder.path / name, name, entry, report, fast=fast)
    if report.count("error") == before:
        what = "sizes" if fast else "sizes and SHA-256"
        report.ok("hashes", f"{what} of {len(table)} files are those of {RECORD_FILE}")
    return set(table)


def _is_outside(name: str) -> bool:
    return PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts


def _check_entry(path: Path, name: str, entry: Any, report: Report, *, fast: bool) -> None:
    size = entry.get("bytes") if isinstance(entry, dict) else None
    if not isinstance(size, int) or "sha256" not in entry:
        report.error("hashes", f"{RECORD_FILE} says nothing usable of {name}", RECORD_FILE)
    elif not path.is_file():
        report.error("hashes", f"{name} is missing: {RECORD_FILE} names it", name)
    elif (found := path.stat().st_size) != size:
        text = f"{name} has {found:,} bytes, {size:,} in {RECORD_FILE}: it was changed"
        report.error("hashes", text, name)
    elif not fast and not _has_hash(path, entry["sha256"]):
        text = f"{name} is not what was written: its SHA-256 differs from {RECORD_FILE}"
        report.error("hashes", text, name)


def _has_hash(path: Path, expected: object) -> bool:
    try:
        return sha256(path) == expected
    except OSError:  # a file that cannot be read cannot be served either
        return False


def check_leftovers(folder: ModelFolder, referred: set[str], report: Report) -> None:
    """Warns of files that nothing refers to: they cost room, or are what is missing elsewhere."""
    for path in sorted(folder.path.rglob("*")):
        name = path.relative_to(folder.path).as_posix()
        known = name in referred or name in _KNOWN or path == folder.graph
        if path.is_dir() or known or name.startswith(_KNOWN_PREFIXES):
            continue
        if not name.endswith(_KNOWN_SUFFIXES):
            report.warning("files", f"{name} belongs to nothing: no other file refers to it", name)
