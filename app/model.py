"""A model folder on a device: loads the session, says what it is, runs the plans of the engine.

optimum loads the model; the engine's batching drives its session directly, through the form that
the graph has (`fused.py`, `portable.py`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from optimum.onnxruntime import ORTModelForCausalLM

from .context import context_warnings, served_context, window_warnings
from .errors import UnservableModel, WrongSetting
from .folder import CONFIG_FILE
from .form import DecoderForm, Run
from .fused import FusedForm
from .graph import Graph, read_graph
from .kv_cache import KVCache, KVShape
from .machine import memory_reader
from .portable import PortableForm
from .precision import find_mismatch
from .record import read_record
from .sequence import StepPlan

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
        self.warnings: list[str] = []
        self.device = torch.device("cuda" if "CUDA" in self.provider else "cpu")
        self.mismatch = find_mismatch(
            self.device, graph.form, self.spec.kv.dtype, self.spec.logits_dtype
        )
        self.deterministic = False
        self._read_memory = memory_reader()
        self._form = _FORMS[graph.form](session, graph, self.device)
        self._logits = torch.empty(0)

    @classmethod
    def load(
        cls, folder: Path, device: str, num_threads: int, graph: Graph | None = None
    ) -> OnnxModel:
        """Loads `folder` on `device` ("auto", "cpu" or "cuda"); `graph` if it was read already.

        Raises UnservableModel for a graph that cannot be served correctly, WrongSetting when
        "cuda" was asked for and the session is not on it.
        """
        graph = graph or read_graph(folder)
        context_length = served_context(folder, graph)
        provider = _choose_provider(device)
        torch.set_num_threads(num_threads)  # torch copies rows, in this thread
        session = _open(folder, graph, provider, num_threads)
        model = cls(session, graph, context_length)
        model.warnings = provider_warnings(provider, model.provider)
        if device == "cuda" and model.device.type != "cuda":
            raise WrongSetting(f"DEVICE=cuda: {model.warnings[0]}")
        model._form.check()
        model.warnings += context_warnings(folder, context_length)
        model.warnings += window_warnings(folder, graph, context_length)
        model.warnings += filter(None, [model.mismatch])
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
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info()[0])
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
            "warnings": self.warnings,
            "context_length": self.context_length,
            "vocab_size": self.spec.vocab_size,
            "kv_bytes_per_token": self.spec.kv.bytes_per_token,
        }

    def forward(self, plan: StepPlan, cache: KVCache) -> NDArray[np.float32]:
        """Runs prefill, then decode; logits `(len(plan.sampled), vocab)`, valid until the next
        call."""
        self._size_logits(cache)
        num_decode = len(plan.decode)
        if plan.prefill is not None:
            chunk = plan.prefill
            ids = np.array([chunk.token_ids], np.int64)  # (1, chunk)
            logits = self._logits[num_decode : num_decode + 1]
            self._form.run(cache, Run(chunk.row, ids, np.array([chunk.start], np.int64), logits))
        if num_decode:
            ids = np.array([[s.last_token] for s in plan.decode], np.int64)  # (rows, 1)
            lengths = np.array([s.num_cached for s in plan.decode], np.int64)
            rows_per_run = 1 if self.deterministic else min(num_decode, plan.rows_per_run)
            for first in range(0, num_decode, rows_per_run):
                rows = slice(first, min(first + rows_per_run, num_decode))
                self._form.run(cache, Run(first, ids[rows], lengths[rows], self._logits[rows]))
        return self._logits[: len(plan.sampled)].float().numpy(force=True)

    def _size_logits(self, cache: KVCache) -> None:
        if len(self._logits) == cache.num_slots:
            return
        self._logits = torch.empty(
            (cache.num_slots, self.spec.vocab_size),
            dtype=self.spec.logits_dtype,
            device=self.device,
        )


def provider_warnings(asked: str, obtained: str) -> list[str]:
    """What an operator should know of where the graph really runs."""
    if asked != obtained:
        return [
            f"the session runs on {obtained} although {asked} is installed: its libraries (CUDA, "
            "cuDNN) do not load, or there is no GPU"
        ]
    return []


def _spec(graph: Graph) -> GraphSpec:
    dtype = getattr(torch, graph.kv_type)
    return GraphSpec(
        KVShape(graph.num_layers, graph.num_kv_heads, graph.head_dim, dtype),
        graph.vocab_size,
        getattr(torch, graph.logits_type),
    )


def _choose_provider(device: str) -> str:
    available = ort.get_available_providers()
    provider = "CPUExecutionProvider"
    if device == "cuda" or (device == "auto" and "CUDAExecutionProvider" in available):
        provider = "CUDAExecutionProvider"
    if provider not in available:
        raise WrongSetting(
            f"DEVICE={device}: this onnxruntime has no {provider} (it has "
            f"{', '.join(available)}); install requirements-gpu.txt"
        )
    return provider


def _open(folder: Path, graph: Graph, provider: str, num_threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # optimum takes a graph without position_ids for an old export; GroupQueryAttention derives each
    # row's positions itself, and a portable graph is put to the proof.
    logging.getLogger("optimum.onnxruntime.modeling_decoder").setLevel(logging.ERROR)
    try:
        if not (folder / CONFIG_FILE).is_file():
            # ONNX Runtime GenAI's layout: optimum asks for a config.json that is not there.
            return ort.InferenceSession(graph.path, options, providers=[provider])
        return ORTModelForCausalLM.from_pretrained(
            folder,
            file_name=graph.path.name,
            provider=provider,
            session_options=options,
            local_files_only=True,
        ).session
    except Exception as error:
        raise UnservableModel(f"{folder} cannot be loaded: {error}") from error
