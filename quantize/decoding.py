"""Runs a fused graph for measurements: rows in lockstep, on the CPU, past and present shared.

The server has its own engine for requests that come and go; here all rows start together.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from . import MODEL_FILE


class Decoding:
    """`rows` sequences of equal length, `max_len` tokens at most."""

    def __init__(self, folder: Path, rows: int, max_len: int, *, is_alone: bool = True) -> None:
        options = ort.SessionOptions()
        if not is_alone:
            # Idle threads of one session would spin on the cores that the other needs.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        self._session = ort.InferenceSession(
            folder / MODEL_FILE, options, providers=["CPUExecutionProvider"]
        )
        self._binding = self._session.io_binding()
        self._rows = rows
        self._num_cached = 0
        [logits] = [node for node in self._session.get_outputs() if node.name == "logits"]
        self._logits = _ort_zeros(rows, 1, logits.shape[2])
        self._binding.bind_ortvalue_output("logits", self._logits)
        self._caches = []  # kept alive while bound
        for node in self._session.get_inputs():
            if not node.name.startswith("past_key_values."):
                continue
            _, num_kv_heads, _, head_dim = node.shape
            cache = _ort_zeros(rows, num_kv_heads, max_len, head_dim)
            self._caches.append(cache)
            self._binding.bind_ortvalue_input(node.name, cache)
            present = node.name.replace("past_key_values", "present")
            self._binding.bind_ortvalue_output(present, cache)

    def feed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Appends `ids`, shape (rows, tokens); logits of each row's last token, (rows, vocab),
        valid until the next call.

        More than one token per row only at the start, or with a single row.
        """
        self._num_cached += ids.shape[1]
        self._binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids))
        mask = np.ones((self._rows, self._num_cached), np.int64)
        self._binding.bind_cpu_input("attention_mask", mask)
        self._session.run_with_iobinding(self._binding)
        logits: NDArray[np.float32] = self._logits.numpy()[:, 0]
        return logits

    def restart(self) -> None:
        """Forgets all tokens; the next ones overwrite them."""
        self._num_cached = 0


def _ort_zeros(*dims: int) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.zeros(dims, np.float32))
