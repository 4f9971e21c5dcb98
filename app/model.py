"""A model folder on a device: loads the session, says what it is, runs the plans of the engine.

optimum loads the model; the engine's batching drives its session directly, through the form that
the graph has (`fused.py`, `portable.py`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from .context import context_warnings, served_context, window_warnings
from .form import DecoderForm, Run
from .fused import FusedForm
from .graph import Graph, read_graph
from .kv_cache import KVCache, KVShape
from .machine import memory_reader
from .portable import PortableForm
from .precision import find_mismatch
from .record import read_record
from .sequence import StepPlan
from .session import open_session

log = logging.getLogger(__name__)

_FORMS: dict[str, type[DecoderForm]] = {"fused": FusedForm, "portable": PortableForm}


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """What the graph itself says, whatever config.json claims."""

    kv: KVShape
    vocab_size: int
    logits_dtype: torch.dtype


class OnnxModel:
    """A decoder graph on one device. Use from one thread.

    `deterministic`: each decoding row has a run of its own, with a mask as wide as the row is long.
    A kernel may add numbers in another order when shapes change (rows, width), and that changes the
    last bits; so every shape depends on the row's own request. A prefill is alone in any case.
    """

    def __init__(self, session: ort.InferenceSession, graph: Graph, context_length: int) -> None:
        self.graph = graph
        self.context_length = context_length
        self.spec = _spec(graph)
        self.provider = session.get_providers()[0]  # what was really obtained
        self.is_fallback = False  # from a GPU that should have been there
        self.warnings: list[str] = []
        self.device = torch.device("cuda" if "CUDA" in self.provider else "cpu")
        self.mismatch = find_mismatch(
            self.device, graph.form, self.spec.kv.dtype, self.spec.logits_dtype
        )
        self.deterministic = False
        self.prefill_seconds: float | None = None  # of the last plan's; None: not measured
        self._read_memory = memory_reader()
        self._form = _FORMS[graph.form](session, graph, self.device)
        self._logits = torch.empty(0)

    @classmethod
    def load(
        cls,
        folder: Path,
        device: str,
        num_threads: int,
        graph: Graph | None = None,
        max_gpu_bytes: int = 0,
    ) -> OnnxModel:
        """Loads `folder` on `device` ("auto", "cpu" or "cuda"); `graph` if it was read already.

        On CUDA this thread must be the one that runs the model: its stream is made here.

        Raises UnservableModel for a graph that cannot be served correctly, WrongSetting when
        "cuda" was asked for and the session is not on it.
        """
        graph = graph or read_graph(folder)
        context_length = served_context(folder, graph)
        torch.set_num_threads(num_threads)  # torch copies rows, in this thread
        opened = open_session(folder, graph, device, num_threads, max_gpu_bytes)
        model = cls(opened.session, graph, context_length)
        if opened.memory is not None:
            model._read_memory = opened.memory.free
        if opened.fallback is not None:
            model.is_fallback = True
            model.warnings.append(f"served on the CPU: {opened.fallback}")
        model._form.check()
        model.warnings += context_warnings(folder, context_length)
        model.warnings += window_warnings(folder, graph, context_length)
        model.warnings += filter(None, [model.mismatch])
        if max_gpu_bytes and model.device.type == "cpu":
            model.warnings.append("MAX_GPU_MEMORY_BYTES bounds nothing: this is the CPU")
        for warning in model.warnings:
            log.warning(warning)
        return model

    @property
    def bytes_per_token(self) -> int:
        """Memory that a token takes while its row runs."""
        return self._form.memory_factor * self.spec.kv.bytes_per_token

    @property
    def bytes_per_row(self) -> int:
        """Memory of a row beside its tokens: its logits."""
        return self.spec.vocab_size * self.spec.logits_dtype.itemsize

    def bytes_of_chunk(self, num_tokens: int) -> int:
        """Memory of the logits of a prompt's chunk, if the graph gives those of every token."""
        if self.graph.has_last_logits_only or num_tokens == 1:
            return 0
        return num_tokens * self.bytes_per_row

    def free_memory(self) -> int:
        """Bytes that the device could still hand out. Raises what CUDA or the cgroup's files do."""
        return self._read_memory()

    def describe(self, folder: Path) -> dict[str, Any]:
        """What is served, for `/info`: from the folder's record, and from the session itself."""
        record = read_record(folder)
        return {
            "model": record.name or folder.resolve().name,
            "precision": record.precision or "unknown",
            "precision_mismatch": self.mismatch is not None,
            "form": self.graph.form,
            "graph_file": self.graph.path.name,
            "provider": self.provider,
            "device": self.device.type,
            "device_fallback": self.is_fallback,
            "warnings": self.warnings,
            "context_length": self.context_length,
            "vocab_size": self.spec.vocab_size,
            "kv_bytes_per_token": self.spec.kv.bytes_per_token,
        }

    def forward(self, plan: StepPlan, cache: KVCache) -> NDArray[np.float32]:
        """Runs prefill, then decode; logits `(len(plan.sampled), vocab)`, valid until the next
        call."""
        return self.forward_there(plan, cache).float().numpy(force=True)

    def forward_there(self, plan: StepPlan, cache: KVCache) -> torch.Tensor:
        """Likewise, but the logits stay on the device, in the graph's type, and on CUDA nobody has
        waited for them."""
        self._size_logits(cache)
        num_decode = len(plan.decode)
        self.prefill_seconds = None
        if plan.prefill is not None:
            started_at = time.monotonic()
            chunk = plan.prefill
            ids = np.array([chunk.token_ids], np.int64)  # (1, chunk)
            logits = self._logits[num_decode : num_decode + 1]
            self._form.run(cache, Run(chunk.row, ids, np.array([chunk.start], np.int64), logits))
            if self.device.type == "cpu":  # elsewhere the run is only queued
                self.prefill_seconds = time.monotonic() - started_at
        if num_decode:
            ids = np.array([[s.last_token] for s in plan.decode], np.int64)  # (rows, 1)
            lengths = np.array([s.num_cached for s in plan.decode], np.int64)
            rows_per_run = 1 if self.deterministic else min(num_decode, plan.rows_per_run)
            for first in range(0, num_decode, rows_per_run):
                rows = slice(first, min(first + rows_per_run, num_decode))
                self._form.run(cache, Run(first, ids[rows], lengths[rows], self._logits[rows]))
        return self._logits[: len(plan.sampled)]

    def _size_logits(self, cache: KVCache) -> None:
        if len(self._logits) == cache.num_slots:
            return
        self._logits = torch.empty(
            (cache.num_slots, self.spec.vocab_size),
            dtype=self.spec.logits_dtype,
            device=self.device,
        )


def _spec(graph: Graph) -> GraphSpec:
    dtype = getattr(torch, graph.kv_type)
    return GraphSpec(
        KVShape(graph.num_layers, graph.num_kv_heads, graph.head_dim, dtype),
        graph.vocab_size,
        getattr(torch, graph.logits_type),
    )
