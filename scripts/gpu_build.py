"""Sections of gpu_check.py: what the machine has, and the folders to check it with.

A section is a function: options in, a report out, whose `ok` is the verdict. Each runs in a process
of its own. Only `--device cuda` tells it from what runs in the tests.
"""

import importlib.metadata
import itertools
import multiprocessing
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
from make_random_model import PHI3_MINI, PHI3_TINY, make_model

from app import cuda

Report = dict[str, Any]
# The default model's shape, SmolLM2-135M's, with Phi-3's vocabulary.
DEFAULT_SHAPE = PHI3_MINI | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
SHAPES = {"tiny": PHI3_TINY, "default": DEFAULT_SHAPE}
PRECISIONS = {"cuda": ("fp16", "int8"), "cpu": ("fp32", "int8")}


@dataclass(frozen=True)
class Options:
    device: str
    folders: dict[str, Path]  # by name
    work: Path  # to be written to
    quick: bool

    @property
    def some_folder(self) -> Path:
        return next(iter(self.folders.values()))


def environment(options: Options) -> Report:
    names = ("onnxruntime", "onnxruntime-gpu", "torch", "transformers", "optimum-onnx", "numpy")
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    found: Report = {
        "ok": True,
        "python": sys.version.split()[0],
        "versions": {name: installed[name] for name in names if name in installed},
        "torch_cuda": torch.version.cuda,
        "providers": ort.get_available_providers(),
        "gpu": None,
    }
    if options.device == "cuda":
        problem = cuda.find_problem()
        cuda.load_libraries()
        unloadable = cuda.find_unloadable()
        found |= {"torch_problem": problem, "unloadable": unloadable}
        found["ok"] = problem is None and unloadable is None
        if problem is None:
            gpu = torch.cuda.get_device_properties(0)
            found["gpu"] = {"name": gpu.name, "bytes": gpu.total_memory, "sm": gpu.major}
    return found


def build(options: Options) -> Report:
    """All at once: each takes one core for most of its time."""
    context = multiprocessing.get_context("fork")
    wanted = [*itertools.product(SHAPES, PRECISIONS[options.device])]
    builds = [context.Process(target=_build, args=(options, *each)) for each in wanted]
    for process in builds:
        process.start()
    for process in builds:
        process.join()
    names = sorted(built(options.work))
    return {"ok": len(names) == len(wanted), "folders": names}


def _build(options: Options, shape: str, precision: str) -> None:
    from quantize.build import build as build_folder
    from quantize.precision import choose
    from quantize.sources import resolve

    name = f"{shape}-{precision}"
    source, root = options.work / f"{name}-source", options.work / f"{name}-building"
    for folder in (source, root / "folder"):
        folder.mkdir(parents=True)
    make_model(source, SHAPES[shape], "float32")
    with resolve(str(source), root / "cache", root) as resolved:
        choice = choose(precision, options.device, allow_slow=True)
        build_folder(resolved, root / "folder", choice, gate=None)
    (root / "folder").rename(options.work / f"{name}.model")


def built(work: Path) -> dict[str, Path]:
    """The folders that are whole, by name."""
    return {folder.stem: folder for folder in sorted(work.glob("*.model"))}
