"""The tutorial's models for Triton, from one of our model folders: `phi3_mini_logits`, and the
ensemble tokenize -> logits -> sample -> text around it. `make_triton_repo.py` calls this.

Templates lie in deploy/triton/; what is filled in is read from the folder's graph.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from string import Template

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a script's own path is scripts/, not the root

from triton_graph import CannotServeLogits, write_without_cache  # noqa: E402

from app.context import served_context  # noqa: E402

__all__ = ["CannotServeLogits", "write_logits_models"]

TEMPLATES = ROOT / "deploy" / "triton"
LOGITS = "phi3_mini_logits"
TOKENIZE, SAMPLE, TEXT = "phi3_mini_tokenize", "phi3_mini_sample", "phi3_mini_text"
ENSEMBLE = "phi3_mini_ensemble"
_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16"}


def write_logits_models(folder: Path, out: Path) -> list[str]:
    """Writes the five models into the repository `out` and returns their names.

    Raises CannotServeLogits.
    """
    version = out / LOGITS / "1"
    version.mkdir(parents=True)
    graph = write_without_cache(folder, version)
    facts = {
        "context_length": served_context(folder, graph),
        "logits_type": _TYPES[graph.logits_type],
        "positions": 1 if graph.has_last_logits_only else -1,
        "vocab_size": graph.vocab_size,
    }
    names = [LOGITS, TOKENIZE, SAMPLE, TEXT, ENSEMBLE]
    for name in names:
        (out / name / "1").mkdir(parents=True, exist_ok=True)  # an ensemble's is empty
        _write_config(name, out, facts | {"kind": "GPU"}, "config.pbtxt")
    _write_config(LOGITS, out, facts | {"kind": "CPU"}, "configs/cpu.pbtxt")
    for name in (TOKENIZE, SAMPLE, TEXT):
        _copy_code(name, out / name / "1")
    for name in (TOKENIZE, TEXT):
        _copy_tokenizer(folder, out / name / "1" / "model")
    return names


def _write_config(name: str, out: Path, facts: dict[str, object], file: str) -> None:
    """Raises KeyError if the template asks for what is not in `facts`."""
    template = Template((TEMPLATES / name / "config.pbtxt").read_text())
    target = out / name / file
    target.parent.mkdir(exist_ok=True)
    target.write_text(template.substitute(facts))


def _copy_code(name: str, version: Path) -> None:
    shutil.copyfile(TEMPLATES / name / "1" / "model.py", version / "model.py")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "app", version / "app", ignore=ignored)


def _copy_tokenizer(folder: Path, target: Path) -> None:
    """What lies beside the weights: small, and a tokenizer may be any of it."""
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix in {".json", ".jinja", ".txt", ".model"}:
            shutil.copyfile(file, target / file.name)
