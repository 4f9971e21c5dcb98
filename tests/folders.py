"""Model folders that `quantize` did not write (optimum's own export, Microsoft's layout), and what
their graphs say by a session of its own."""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from quantize import MODEL_FILE

# As Microsoft names the graph of a published Phi-3 folder.
ODD_NAME = "phi3-mini-4k-instruct-cpu-int4-rtn-block-32-acc-level-4.onnx"


def make_portable(source: Path, folder: Path) -> Path:
    """What `optimum-cli export onnx` makes of a Hugging Face folder."""
    from optimum.exporters.onnx import main_export

    with warnings.catch_warnings():  # of their own deprecated export path, while they take it
        warnings.simplefilter("ignore")
        main_export(str(source), folder, task="text-generation-with-past", do_validation=False)
    return folder


def make_genai(source: Path, folder: Path, precision: str = "fp32", device: str = "cpu") -> Path:
    """What Microsoft's builder makes of it: no config.json, logits of every position. For "cuda"
    keys, values and logits are fp16."""
    from onnxruntime_genai.models.builder import create_model

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        create_model(
            None,
            str(source),
            str(folder),
            precision,
            device,
            str(folder / "cache"),
            hf_token="false",
            hf_remote=False,
            filename=ODD_NAME,
        )
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return folder


class GraphReference:
    """The same graph, read anew for every token: one row, no past, so no cache can be wrong."""

    def __init__(self, graph: Path) -> None:
        self._session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self._logits(ids).argmax()))
        return ids[len(prompt) :]

    def _logits(self, ids: list[int]) -> np.ndarray:
        row = np.array([ids], np.int64)
        feeds = {"input_ids": row, "attention_mask": np.ones_like(row)}
        for node in self._session.get_inputs()[2:]:
            _, heads, _, width = node.shape
            kind = np.float16 if node.type == "tensor(float16)" else np.float32
            feeds[node.name] = np.zeros((1, heads, 0, width), kind)
        logits: np.ndarray = self._session.run(["logits"], feeds)[0][0, -1]
        return logits


def make_probe(folder: Path, token_ids: list[int], num_top: int = 8) -> dict[str, Any]:
    """What the folder's graph says here, by a session of its own."""
    session = ort.InferenceSession(folder / MODEL_FILE)
    feeds = {"input_ids": np.array([token_ids]), "attention_mask": np.ones((1, len(token_ids)))}
    feeds = {name: values.astype(np.int64) for name, values in feeds.items()}
    for node in session.get_inputs()[2:]:
        feeds[node.name] = np.zeros((1, node.shape[1], 0, node.shape[3]), np.float32)
    logits = session.run(["logits"], feeds)[0][0, 0]
    top_ids = np.argsort(-logits)[:num_top]
    return {
        "token_ids": token_ids,
        "top_ids": top_ids.tolist(),
        "top_logits": logits[top_ids].tolist(),
        "max_difference": 0.01,
    }
