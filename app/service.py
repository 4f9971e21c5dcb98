"""What the routes work with: settings, metrics, the bridge and, once loaded, the model's text side.

`_load` runs on the engine thread and imports torch, transformers and ONNX Runtime there, so that
the hub answers health checks from the first moment.
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from .bridge import Bridge, State
from .completion import Completion
from .config import Settings
from .errors import InvalidRequest, NotReady, UnservableModel, WrongSetting
from .machine import available_cpus
from .metrics import Metrics
from .protocol import GenerateRequest, resolve_max_tokens
from .record import Probe, read_record
from .sequence import Sequence

if TYPE_CHECKING:
    from .engine import Engine
    from .model import OnnxModel
    from .text import TextCodec

log = logging.getLogger(__name__)

_KV_MEMORY_SHARE = 0.8  # of what is free once the weights are loaded; the rest is workspace
_LONG_PROMPT = 8192  # characters
_SHOWN_VERSIONS = ("onnxruntime", "onnxruntime-gpu", "optimum-onnx", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The hub's side of a loaded model."""

    name: str
    codec: TextCodec
    max_model_len: int
    info: dict[str, Any]


class Service:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.bridge = Bridge(self._load)
        self._model: LoadedModel | None = None

    @property
    def model(self) -> LoadedModel:
        """Raises NotReady until the model is loaded and has produced a token.

        Failed steps do not count here: the next request may well succeed.
        """
        if self._model is None or self.bridge.state is not State.READY:
            raise NotReady(self.bridge.why_not_ready)
        return self._model

    def submit(self, request: GenerateRequest) -> Completion:
        """Tokenizes and queues a request. Raises InvalidRequest if it does not fit."""
        model, arrived_at = self.model, time.monotonic()
        # A long prompt takes long to tokenize: not on the hub, where it would stall every stream.
        encode, text, raw = model.codec.encode, request.prompt, request.parse_special
        if len(text) > _LONG_PROMPT:
            prompt_ids = self.bridge.off_hub(encode, text, parse_special=raw)
        else:
            prompt_ids = encode(text, parse_special=raw)
        if not prompt_ids:
            raise InvalidRequest("prompt: it has no tokens", param="prompt")
        max_tokens = resolve_max_tokens(request, len(prompt_ids), model.max_model_len)
        sequence = Sequence(
            request_id=f"gen-{uuid.uuid4().hex}",
            prompt_ids=prompt_ids,
            params=request.sampling_params(max_tokens),
            arrived_at=arrived_at,
        )
        return Completion(self.bridge.submit(sequence), model.codec.detokenizer())

    def _load(self) -> Engine:
        from .engine import Engine
        from .kv_cache import KVBudget, KVCache
        from .model import OnnxModel
        from .scheduler import Scheduler
        from .text import TextCodec

        settings, started_at = self.settings, time.monotonic()
        num_threads = settings.threads or available_cpus()
        folder = settings.model_path
        record = read_record(folder)
        codec = TextCodec.load(folder)
        model = OnnxModel.load(folder, settings.device, num_threads)
        if codec.vocab_size > model.spec.vocab_size:
            raise UnservableModel(
                f"{folder}: the tokenizer has {codec.vocab_size} tokens, the graph "
                f"{model.spec.vocab_size}: they do not belong together"
            )
        mismatch = _find_mismatch(model, settings)
        if record.probe is not None:
            _check_probe(record.probe, model)
        context_length = record.cap(model.context_length)
        max_len = settings.max_model_len or context_length
        budget = KVBudget(
            num_bytes=int(_KV_MEMORY_SHARE * model.free_memory()),
            bytes_per_row=max_len * model.spec.kv.bytes_per_token,
            max_rows=settings.max_batch_size,
        )
        if budget.num_rows < 1:
            raise WrongSetting(
                f"the KV cache of one request of {max_len} tokens takes {budget.bytes_per_row:,} "
                f"bytes, and {budget.num_bytes:,} can be had: lower MAX_MODEL_LEN"
            )
        cache = KVCache(model.spec.kv, budget.num_rows, max_len, model.device)
        scheduler = Scheduler(budget.num_rows, max_len, settings.prefill_chunk, codec.eos_ids)
        description = model.describe(folder)
        self._model = LoadedModel(
            name=description["model"],
            codec=codec,
            max_model_len=max_len,
            info=description
            | {
                "requested_device": settings.device,
                "precision_mismatch": mismatch is not None,
                "probe": "none" if record.probe is None else "passed",
                "context_length": context_length,
                "warnings": [*model.warnings, *filter(None, (mismatch, record.context_note))],
                "threads": num_threads,
                "max_batch_size": budget.num_rows,
                "max_model_len": max_len,
                "prefill_chunk": settings.prefill_chunk,
                "eos_token_ids": sorted(codec.eos_ids),
                "kv_cache_bytes": budget.num_rows * budget.bytes_per_row,
                "versions": _versions(),
            },
        )
        log.info("loaded %s in %.1f s", self._model.info, time.monotonic() - started_at)
        return Engine(model, cache, scheduler, self.metrics)


def _check_probe(probe: Probe, model: OnnxModel) -> None:
    """On a cache of its own: a row for requests may be shorter than the probe."""
    from .kv_cache import KVCache
    from .probe import check_probe

    cache = KVCache(model.spec.kv, 1, len(probe.token_ids) + 1, model.device)
    check_probe(probe, model, model.spec.vocab_size, cache)


def _find_mismatch(model: OnnxModel, settings: Settings) -> str | None:
    """Why the graph's precision does not suit the device; raises WrongSetting in strict mode."""
    from .precision import find_mismatch

    spec = model.spec
    mismatch = find_mismatch(model.device, model.form, spec.kv.dtype, spec.logits_dtype)
    if mismatch is not None:
        if settings.strict_precision:
            raise WrongSetting(f"STRICT_PRECISION: {mismatch}")
        log.warning(mismatch)
    return mismatch


def _versions() -> dict[str, str]:
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: installed[name] for name in _SHOWN_VERSIONS if name in installed}
