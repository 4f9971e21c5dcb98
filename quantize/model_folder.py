"""A model folder as it lies there: ours, optimum's, or ONNX Runtime GenAI's layout.

Reads the small JSON files and finds the graph. What is missing or broken becomes a finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from . import MODEL_FILE
from .errors import QuantizeError
from .export import read_config
from .hashes import RECORD_FILE
from .json_file import read_json
from .report import Report

GENAI_FILE = "genai_config.json"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    graph: Path | None
    config: PretrainedConfig | None
    generation: dict[str, Any]  # {} where there is none
    genai: dict[str, Any]
    record: dict[str, Any]

    @property
    def genai_model(self) -> dict[str, Any]:
        return _object(self.genai, "model")

    @property
    def is_ours(self) -> bool:
        """Whether `quantize` wrote it: then the graph was made for what config.json says."""
        return (self.path / RECORD_FILE).is_file()

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer that the folder promises: the smallest number in a file."""
        stated = [self.record.get("context_length"), self.genai_model.get("context_length")]
        if self.config is not None:
            stated.append(getattr(self.config.get_text_config(), "max_position_embeddings", None))
        return min((number for number in stated if isinstance(number, int)), default=None)


def read_folder(path: Path, report: Report) -> ModelFolder:
    genai = _read_if_there(path / GENAI_FILE, report)
    return ModelFolder(
        path=path,
        graph=_find_graph(path, genai, report),
        config=_read_config(path, report),
        generation=_read_if_there(path / "generation_config.json", report),
        genai=genai,
        record=_read_if_there(path / RECORD_FILE, report),
    )


def _read_if_there(path: Path, report: Report) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_json(path)
    except QuantizeError as error:
        report.error("config", str(error), path.name)
        return {}


def _object(content: dict[str, Any], key: str) -> dict[str, Any]:
    found = content.get(key)
    return found if isinstance(found, dict) else {}


def _read_config(path: Path, report: Report) -> PretrainedConfig | None:
    if not (path / "config.json").is_file():
        if not (path / GENAI_FILE).is_file():
            text = f"config.json is missing, and {GENAI_FILE}: nothing says what the model is"
            report.error("config", text)
        return None
    try:
        return read_config(path)
    except QuantizeError as error:
        report.error("config", str(error), "config.json")
        return None


def _find_graph(path: Path, genai: dict[str, Any], report: Report) -> Path | None:
    """The one that the server takes: our name, else what genai_config.json names, else the only."""
    named = _object(_object(genai, "model"), "decoder").get("filename")
    found = sorted(file.name for file in path.glob("*.onnx"))
    if MODEL_FILE in found:
        return path / MODEL_FILE
    if named is not None:
        if not isinstance(named, str) or Path(named).name != named:
            report.error("graph", f"{GENAI_FILE} calls the graph {named!r}, no file's name")
            return None
        if named not in found:
            report.error("graph", f"{named} is missing: {GENAI_FILE} names it", named)
            return None
        return path / named
    if len(found) == 1:
        return path / found[0]
    if found:
        report.error("graph", f"which graph is meant? {', '.join(found)}; none is {MODEL_FILE}")
        return None
    deeper = sorted({file.parent.relative_to(path).as_posix() for file in path.rglob("*.onnx")})
    hint = f"; there are some in {', '.join(deeper)}" if deeper else ""
    report.error("graph", f"{MODEL_FILE} is missing, and there is no other .onnx file{hint}")
    return None
