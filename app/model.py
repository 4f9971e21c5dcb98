"""The ONNX session: inspects the graph, binds the cache, runs a plan. `past` and `present` exist
only here. optimum loads the model; the engine's batching drives its session directly."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from optimum.onnxruntime import ORTModelForCausalLM

from .errors import UnservableModel, WrongSetting
from .kv_cache import KVCache, KVShape
from .machine import available_memory
from .sequence import StepPlan

log = logging.getLogger(__name__)

MODEL_FILE = "model.onnx"
RECORD_FILE = "quantization.json"
_TORCH_TYPES = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}
_NUMPY_TYPES = {torch.float32: np.float32, torch.float16: np.float16}


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """What the graph itself says, whatever config.json claims."""

    kv: KVShape
    vocab_size: int
    logits_dtype: torch.dtype


class OnnxModel:
    """A fused decoder graph on one device. Use from one thread.

    Past and present keys of a run are the same memory: the kernel appends in place, so a step
    copies no cache. Which rows a run covers is fixed by shape and address of what is bound: a
    decode run binds rows 0..n-1, a prefill run one row by its offset.
    """

    form = "fused"

    def __init__(self, session: ort.InferenceSession, context_length: int) -> None:
        self._session = session
        self.context_length = context_length
        self.spec = inspect_graph(session)
        self.provider = session.get_providers()[0]  # what was really obtained
        self.warnings: list[str] = []
        self.device = torch.device("cuda" if "CUDA" in self.provider else "cpu")
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}
        self._bound_cache: KVCache | None = None
        self._logits = torch.empty(0)

    @classmethod
    def load(cls, folder: Path, device: str, num_threads: int) -> OnnxModel:
        """Loads `folder` on `device` ("auto", "cpu" or "cuda").

        Raises UnservableModel for a graph that cannot be served correctly, WrongSetting when
        "cuda" was asked for and the session is not on it.
        """
        available = ort.get_available_providers()
        provider = "CPUExecutionProvider"
        if device == "cuda" or (device == "auto" and "CUDAExecutionProvider" in available):
            provider = "CUDAExecutionProvider"
        if provider not in available:
            raise WrongSetting(
                f"DEVICE={device}: this onnxruntime has no {provider} (it has "
                f"{', '.join(available)}); install requirements-gpu.txt"
            )
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # optimum takes a graph without position_ids for an old export; in ours
        # GroupQueryAttention derives each row's positions itself.
        logging.getLogger("optimum.onnxruntime.modeling_decoder").setLevel(logging.ERROR)
        try:
            loaded = ORTModelForCausalLM.from_pretrained(
                folder,
                file_name=MODEL_FILE,
                provider=provider,
                session_options=options,
                local_files_only=True,
            )
        except Exception as error:
            raise UnservableModel(f"{folder} cannot be loaded: {error}") from error
        model = cls(loaded.session, loaded.config.max_position_embeddings)
        model.warnings = provider_warnings(provider, model.provider)
        if device == "cuda" and model.device.type != "cuda":
            raise WrongSetting(f"DEVICE=cuda: {model.warnings[0]}")
        for warning in model.warnings:
            log.warning(warning)
        return model

    def free_memory(self) -> int:
        """Bytes that the device could still hand out."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info()[0])
        return available_memory()

    def describe(self, folder: Path) -> dict[str, Any]:
        """What is served, for `/info`: from the folder's record, and from the session itself."""
        record: dict[str, Any] = {}
        if (folder / RECORD_FILE).is_file():
            record = json.loads((folder / RECORD_FILE).read_text())
        return {
            "model": record.get("name", folder.resolve().name),
            "precision": record.get("precision", "unknown"),
            "form": self.form,
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
        self._bind_cache(cache)
        num_decode = len(plan.decode)
        if plan.prefill is not None:
            chunk = plan.prefill
            ids = np.array([chunk.token_ids], np.int64)  # (1, chunk)
            mask = np.ones((1, chunk.start + len(chunk.token_ids)), np.int64)
            self._run(cache, chunk.row, ids, mask, self._logits[num_decode : num_decode + 1])
        if num_decode:
            ids = np.array([[s.last_token] for s in plan.decode], np.int64)  # (rows, 1)
            lengths = np.array([s.num_cached + 1 for s in plan.decode])  # with the new token
            # Ones up to each row's own length: GroupQueryAttention counts them to find where the
            # row ends, so rows of any lengths share a run.
            mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
            self._run(cache, 0, ids, mask, self._logits[:num_decode])
        return self._logits[: len(plan.sampled)].float().numpy(force=True)

    def _run(
        self,
        cache: KVCache,
        first_row: int,
        ids: NDArray[np.int64],  # (rows, tokens)
        mask: NDArray[np.int64],  # (rows, longest row with the new tokens)
        logits: torch.Tensor,  # (rows, vocab), written
    ) -> None:
        binding = self._binding(cache, first_row, len(ids))
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", mask)
        binding.bind_output(
            "logits",
            self.device.type,
            0,
            _NUMPY_TYPES[logits.dtype],
            (len(ids), 1, self.spec.vocab_size),
            logits.data_ptr(),
        )
        # ONNX Runtime has a CUDA stream of its own: what torch has queued on another (moved rows)
        # must be there first, and the logits before they are read.
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._session.run_with_iobinding(binding)
        if self.device.type == "cuda":
            binding.synchronize_outputs()

    def _bind_cache(self, cache: KVCache) -> None:
        if cache is self._bound_cache:
            return
        self._bound_cache = cache
        self._bindings.clear()
        self._logits = torch.empty(
            (cache.num_rows, self.spec.vocab_size),
            dtype=self.spec.logits_dtype,
            device=self.device,
        )

    def _binding(self, cache: KVCache, first_row: int, num_rows: int) -> ort.IOBinding:
        """Past and present of these rows bound to the cache; made once per pair of numbers."""
        found = self._bindings.get((first_row, num_rows))
        if found is not None:
            return found
        binding = self._session.io_binding()
        dtype = _NUMPY_TYPES[self.spec.kv.dtype]
        for index, layer in enumerate(cache.layers):
            rows = layer[first_row : first_row + num_rows]
            kind = "value" if index % 2 else "key"
            place = (self.device.type, 0, dtype, tuple(rows.shape), rows.data_ptr())
            binding.bind_input(f"past_key_values.{index // 2}.{kind}", *place)
            binding.bind_output(f"present.{index // 2}.{kind}", *place)
        self._bindings[first_row, num_rows] = binding
        return binding


def provider_warnings(asked: str, obtained: str) -> list[str]:
    """What an operator should know of where the graph really runs."""
    if asked != obtained:
        return [
            f"the session runs on {obtained} although {asked} is installed: its libraries (CUDA, "
            "cuDNN) do not load, or there is no GPU"
        ]
    return []


def inspect_graph(session: ort.InferenceSession) -> GraphSpec:
    """Reads layers, heads and types off the graph's inputs and outputs.

    Raises UnservableModel, saying what was found, if it is not a fused decoder graph whose logits
    are those of the last token.
    """
    inputs = {node.name: node for node in session.get_inputs()}
    outputs = {node.name: node for node in session.get_outputs()}
    keys = [n for n in inputs if n.startswith("past_key_values.") and n.endswith(".key")]
    problems: list[str] = []
    if not {"input_ids", "attention_mask"} <= inputs.keys():
        problems.append("it lacks the inputs input_ids and attention_mask")
    if not keys:
        problems.append("it has no past_key_values inputs (exported without a KV cache)")
    if "position_ids" in inputs:
        problems.append("it takes position_ids (optimum's own export, not the fused form)")
    if "logits" not in outputs or outputs["logits"].shape[1] != 1:
        problems.append("its logits are not those of the last token only")
    if problems:
        raise UnservableModel(
            f"the graph cannot be served: {'; '.join(problems)}. "
            "Build the folder with `python -m quantize`."
        )
    _, num_kv_heads, _, head_dim = inputs[keys[0]].shape
    return GraphSpec(
        KVShape(len(keys), num_kv_heads, head_dim, _torch_type(inputs[keys[0]])),
        outputs["logits"].shape[2],
        _torch_type(outputs["logits"]),
    )


def _torch_type(node: Any) -> torch.dtype:
    if node.type not in _TORCH_TYPES:
        raise UnservableModel(f"{node.name} has type {node.type}; float or float16 is served")
    return _TORCH_TYPES[node.type]
