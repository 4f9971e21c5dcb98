"""Runs a graph for measurements: rows in lockstep, on the CPU.

The server has its own engine for requests that come and go; here all rows start together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from . import MODEL_FILE
from .graph_file import load_graph

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Decoding:
    """`rows` sequences of equal length, `max_len` tokens at most.

    A fused graph appends to its cache in place; a portable one gives a longer cache back each time,
    which is handed in again.
    """

    def __init__(
        self,
        folder: Path,
        rows: int,
        max_len: int,
        *,
        is_alone: bool = True,
        options: ort.SessionOptions | None = None,
        run_options: ort.RunOptions | None = None,
    ) -> None:
        options = options or ort.SessionOptions()
        if not is_alone:
            # Idle threads of one session would spin on the cores that the other needs.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        self._session = ort.InferenceSession(
            folder / MODEL_FILE, options, providers=["CPUExecutionProvider"]
        )
        inputs = {node.name: node for node in self._session.get_inputs()}
        [logits] = [node for node in self._session.get_outputs() if node.name == "logits"]
        self._pasts = {name: node for name, node in inputs.items() if name.startswith("past_")}
        self._takes_positions = "position_ids" in inputs
        nodes = load_graph(folder / MODEL_FILE).graph.node
        self._is_fused = any(node.op_type == "GroupQueryAttention" for node in nodes)
        self._rows = rows
        self._run_options = run_options
        self._max_len = max_len
        self._logits_shape = logits.shape
        self._logits_type = _TYPES[logits.type]
        self._binding = self._session.io_binding()
        self._logits: NDArray[Any] = np.zeros(0)
        self._caches: dict[str, ort.OrtValue] = {}  # kept alive while bound
        self.restart()

    def restart(self) -> None:
        """Forgets all tokens."""
        self._num_cached = 0
        if self._is_fused and self._caches:
            return  # the next tokens overwrite them
        for name, node in self._pasts.items():
            _, num_kv_heads, _, head_dim = node.shape
            length = self._max_len if self._is_fused else 0
            shape = (self._rows, num_kv_heads, length, head_dim)
            self._bind_past(name, _zeros(shape, _TYPES[node.type]))

    def feed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Appends `ids`, shape (rows, tokens); logits of each row's last token, (rows, vocab),
        which the next call overwrites.

        More than one token per row only at the start, or with a single row.
        """
        start = self._num_cached
        self._num_cached += ids.shape[1]
        self._binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids))
        mask = np.ones((self._rows, self._num_cached), np.int64)
        self._binding.bind_cpu_input("attention_mask", mask)
        if self._takes_positions:
            positions = np.arange(start, self._num_cached, dtype=np.int64)
            self._binding.bind_cpu_input("position_ids", np.tile(positions, (self._rows, 1)))
        self._bind_logits(ids.shape[1])
        if not self._is_fused:
            for name in self._pasts:
                self._binding.bind_output(_present(name), "cpu")
        self._session.run_with_iobinding(self._binding, self._run_options)
        if not self._is_fused:
            self._take_presents()
        return self._logits[:, -1].astype(np.float32, copy=False)

    def _bind_logits(self, num_tokens: int) -> None:
        length = 1 if self._logits_shape[1] == 1 else num_tokens
        shape = (self._rows, length, self._logits_shape[2])
        if self._logits.shape != shape:
            # An array of ours: a view of it stays good when the session is gone.
            self._logits = np.zeros(shape, self._logits_type)
        self._binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(self._logits))

    def _bind_past(self, name: str, cache: ort.OrtValue) -> None:
        self._caches[name] = cache
        self._binding.bind_ortvalue_input(name, cache)
        if self._is_fused:
            self._binding.bind_ortvalue_output(_present(name), cache)

    def _take_presents(self) -> None:
        """The grown caches become the next step's past, without a copy."""
        outputs = self._binding.get_outputs()  # in the order in which they were bound
        for name, present in zip(self._pasts, outputs[1:], strict=True):
            self._bind_past(name, present)


def _present(past: str) -> str:
    return past.replace("past_key_values", "present")


def _zeros(shape: tuple[int, ...], dtype: Any) -> ort.OrtValue:
    if 0 in shape:
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, "cpu")
    return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype))
