"""HF folder -> portable graph (optimum's own export, fp32), for what cannot be fused.

Inputs `input_ids, attention_mask, position_ids, past_key_values.*`, logits of every token. The
traced graph is compared with torch before it is handed on: tracing freezes branches in silence.
"""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from . import MODEL_FILE
from .checkpoint import refuse_missing
from .errors import QuantizeError
from .forms import portable_config
from .graph_copy import copy_graph

# Beyond the 16 tokens with 16 in the cache that optimum traces with; rows of two lengths.
_LENGTHS = (33, 9)
_MAX_DIFFERENCE = 1e-3  # of the largest logit; measured: 1e-6 of it


def export_portable(source: Path, folder: Path, on_stage: Callable[[str], None]) -> None:
    """Writes `model.onnx` and `model.onnx.data` into `folder`; `on_stage` hears a line per stage.

    Raises QuantizeError if the graph does not say what torch says.
    """
    on_stage("loading the weights")
    model = _load(source)
    rows = _rows(model.config)
    with _refusing("torch cannot run it"):
        expected = [_torch_logits(model, row) for row in rows]
    with tempfile.TemporaryDirectory(dir=folder, prefix="traced-") as scratch:
        on_stage("tracing")
        with _refusing("optimum's export fails"):
            _trace(model, Path(scratch) / MODEL_FILE)
        del model  # as large as the files that are written now
        on_stage("writing the weights")
        copy_graph(Path(scratch) / MODEL_FILE, folder)
    on_stage("comparing with torch")
    with _refusing("ONNX Runtime cannot load the exported graph"):
        graph = _Graph(folder / MODEL_FILE)
    _compare(graph, rows, expected)


def _load(source: Path) -> Any:
    """Raises QuantizeError if a weight is missing. Which they are is known to transformers alone:
    many checkpoints lack a prefix of the model's names."""
    with _refusing(f"{source} cannot be loaded"):
        model, found = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    refuse_missing(source, found["missing_keys"])
    return model.eval()


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raises QuantizeError, which begins with `what`, for whatever is raised inside."""
    try:
        yield
    except Exception as error:  # of transformers, torch, optimum and ONNX Runtime
        raise QuantizeError(f"{what}: {error or repr(error)}") from error


def _trace(model: Any, target: Path) -> None:
    """As `optimum.exporters.onnx.convert.export_pytorch`, which would then load the whole graph
    into memory once more to write its weights into one file."""
    export = portable_config(model.config.model_type, model.config)
    model.config.return_dict = model.config.use_cache = True
    arguments: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 0  # all
    dummies = export.rename_ambiguous_inputs(export.generate_dummy_inputs(framework="pt"))
    with (
        torch.no_grad(),
        export.patch_model_for_export(model, model_kwargs=arguments),
        warnings.catch_warnings(),
    ):
        # A line per branch and constant; whether one matters is found out by comparing.
        warnings.simplefilter("ignore")
        inputs = export.ordered_inputs(model)
        torch.onnx.export(
            model,
            (dummies,),
            str(target),
            input_names=list(inputs),
            output_names=list(export.outputs),
            dynamic_axes={**inputs, **export.outputs},
            opset_version=export.DEFAULT_ONNX_OPSET,
            dynamo=False,
        )


def _rows(config: Any) -> list[list[int]]:
    """Random token ids, each row one longer than it is read at first."""
    rng = np.random.default_rng(7)
    room = getattr(config, "max_position_embeddings", None) or max(_LENGTHS) + 1
    lengths = (min(length + 1, room) for length in _LENGTHS)
    return [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]


@torch.no_grad()
def _torch_logits(model: Any, row: list[int]) -> NDArray[np.float32]:
    """Of the last two tokens, read at once and alone: (2, vocab)."""
    logits: NDArray[np.float32] = model(torch.tensor([row]), use_cache=False).logits[0, -2:].numpy()
    return logits


def _compare(graph: _Graph, rows: list[list[int]], expected: list[NDArray[np.float32]]) -> None:
    """All rows but their last token in one run, left-padded; then the last ones, with a past."""
    width = max(map(len, rows)) - 1
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        ids[index, width - len(row) + 1 :] = row[:-1]
        mask[index, width - len(row) + 1 :] = 1
    last = np.array([row[-1:] for row in rows], np.int64)
    with _refusing("ONNX Runtime cannot run the exported graph"):
        first = graph.run(ids, mask)
        second = graph.run(last, np.concatenate([mask, np.ones_like(last)], axis=1))
    for index, wanted in enumerate(expected):
        found = np.stack([first[index], second[index]])
        difference = float(np.abs(found - wanted).max())
        limit = _MAX_DIFFERENCE * max(1.0, float(np.abs(wanted).max()))
        if not difference <= limit:  # so that NaN is told, too
            raise QuantizeError(
                f"the exported graph differs from torch by {difference:.2g} in its logits, at most "
                f"{limit:.2g} is allowed: its architecture cannot be exported rightly"
            )


class _Graph:
    """A portable graph, its cache and the positions of its tokens."""

    def __init__(self, path: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._shapes = {
            node.name: node.shape
            for node in self._session.get_inputs()
            if node.name.startswith("past_key_values.")
        }
        self._past: dict[str, Any] = {}

    def run(
        self,
        ids: NDArray[np.int64],  # (rows, tokens)
        mask: NDArray[np.int64],  # (rows, tokens with those of the past)
    ) -> NDArray[np.float32]:
        """Logits of each row's last token, (rows, vocab)."""
        past = self._past or {
            name: np.zeros((len(ids), heads, 0, head_dim), np.float32)
            for name, (_, heads, _, head_dim) in self._shapes.items()
        }
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
        fixed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        names = [name.replace("past_key_values", "present") for name in self._shapes]
        logits, *present = self._session.run(["logits", *names], {**fixed, **past})
        self._past = dict(zip(self._shapes, present, strict=True))
        last: NDArray[np.float32] = logits[:, -1]
        return last
