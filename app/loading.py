"""From a model folder to an engine that may step: loads, refuses what does not fit, sizes rows.

Belongs to the engine thread: importing this module takes seconds (torch, transformers, ONNX
Runtime).
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import device_sampler
from .arena import Arena, KVLimits, default_max_rows
from .chat import ChatTemplate
from .config import Settings
from .engine import Engine, Model, Observer, Sampler
from .errors import UnservableModel, WrongSetting
from .grammar import Grammars
from .graph import Graph
from .kv_cache import KVCache, is_lazy
from .machine import available_cpus
from .memory import MemoryBudget
from .model import OnnxModel
from .prefixes import MIN_SHARED
from .probe import check_probe
from .record import Probe, read_record
from .sampler import sample
from .scheduler import Scheduler
from .text import TextCodec

log = logging.getLogger(__name__)

_FIRST_LEN = 256  # tokens: the smallest bucket of a slot's length
_FIRST_LAZY_LEN = 1024
_SHOWN_VERSIONS = ("onnxruntime", "onnxruntime-gpu", "optimum-onnx", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The hub's side of a loaded model."""

    name: str
    codec: TextCodec
    max_model_len: int
    vocab_size: int  # of the logits: often more than the tokenizer has
    created_at: int  # seconds since 1970
    info: dict[str, Any]
    chat: ChatTemplate
    grammars: Grammars | None = None  # None: they cannot be made for this tokenizer


def load(
    graph: Graph, settings: Settings, observer: Observer, enter: Callable[[str], None]
) -> tuple[Engine, LoadedModel]:
    """`enter` hears of each stage. Raises UnservableModel or WrongSetting, saying what is wrong and
    what to do."""
    folder = settings.model_path
    num_threads = settings.threads or available_cpus()
    probe = read_record(folder).probe
    enter("reading the tokenizer")
    codec = TextCodec.load(folder)
    enter("loading weights")
    model = OnnxModel.load(
        folder, settings.device, num_threads, graph, settings.max_gpu_memory_bytes
    )
    model.deterministic = settings.deterministic
    _check_fit(model, codec, settings)
    if probe is not None:
        enter("probing")
        _run_probe(probe, model)
    eos_ids = _known_eos_ids(codec, model.spec.vocab_size)
    enter("preparing to serve")
    budget = MemoryBudget(model.free_memory, settings.kv_memory_share)
    arena = _make_arena(model, settings, budget.update(0))
    cache = KVCache(model.spec.kv, *arena.size, model.device)
    max_rows, max_len = arena.limits.max_rows, arena.limits.max_len
    # Chunks by the clock would differ from run to run, and with them the last bits of logits.
    stall = 0.0 if settings.deterministic else settings.prefill_stall
    scheduler = Scheduler(
        *(max_rows, max_len, settings.prefill_chunk, eos_ids, arena),
        is_exact=model.deterministic,
        min_shared=MIN_SHARED if settings.prefix_cache and not model.deterministic else None,
        prefill_stall=stall,
    )
    chat = ChatTemplate(codec)
    grammars = _make_grammars(codec, model.spec.vocab_size, eos_ids)
    info = model.describe(folder) | {
        "requested_device": settings.device,
        "probe": "none" if probe is None else "passed",
        "threads": num_threads,
        "deterministic": model.deterministic,
        "max_batch_size": max_rows,
        "max_model_len": max_len,
        "prefill_chunk": settings.prefill_chunk,
        "prefix_cache": settings.prefix_cache and not model.deterministic,
        "prefill_stall": stall,
        "eos_token_ids": sorted(eos_ids),
        **chat.describe(),
        "structured_output": grammars is not None,
        "versions": _versions(),
    }
    run_model, sampler = _sampled(model)
    engine = Engine(
        *(run_model, cache, scheduler, observer),
        num_threads=num_threads,
        sampler=sampler,
        budget=budget.update,
        idle_seconds=settings.kv_idle_seconds,
    )
    created_at = int(model.graph.path.stat().st_mtime)
    loaded = LoadedModel(
        *(info["model"], codec, max_len, model.spec.vocab_size, created_at, info, chat),
        grammars,
    )
    return engine, loaded


def _sampled(model: OnnxModel) -> tuple[Model, Sampler]:
    """On a GPU tokens are chosen where the logits are: a row is 128 kB, its token 8 bytes."""
    if model.device.type == "cpu":
        return model, sample
    return device_sampler.DeviceModel(model), device_sampler.sample


def _check_fit(model: OnnxModel, codec: TextCodec, settings: Settings) -> None:
    """The graph, the tokenizer and what was asked for belong together."""
    if codec.vocab_size > model.spec.vocab_size:
        raise UnservableModel(
            f"{settings.model_path}: the tokenizer has {codec.vocab_size} tokens, the graph "
            f"{model.spec.vocab_size}: they do not belong together"
        )
    if settings.strict_precision and model.mismatch is not None:
        raise WrongSetting(f"STRICT_PRECISION: {model.mismatch}")
    if settings.max_model_len > model.context_length:  # the graph knows of less than the files
        raise WrongSetting(
            f"MAX_MODEL_LEN={settings.max_model_len}: {model.context_length} tokens are served of "
            "this graph, for longer rows would change the rotary factors of all (longrope)"
        )


def _known_eos_ids(codec: TextCodec, vocab_size: int) -> frozenset[int]:
    """Those that the graph can say: config files may name others."""
    known = frozenset(id_ for id_ in codec.eos_ids if id_ < vocab_size)
    if not known:
        raise UnservableModel(
            f"the graph has {vocab_size} tokens, and none of the end tokens "
            f"{sorted(codec.eos_ids)}: no answer would end"
        )
    return known


def _make_grammars(codec: TextCodec, vocab_size: int, eos_ids: frozenset[int]) -> Grammars | None:
    try:
        return Grammars(codec.tokenizer, vocab_size, eos_ids)
    except ValueError as error:
        log.warning("no structured output with this tokenizer: %s", error)
        return None


def _run_probe(probe: Probe, model: OnnxModel) -> None:
    """On a cache of its own: a row for requests may be shorter than the probe."""
    cache = KVCache(model.spec.kv, 1, len(probe.token_ids) + 1, model.device)
    check_probe(probe, model, model.spec.vocab_size, cache)


def _make_arena(model: OnnxModel, settings: Settings, usable: int) -> Arena:
    """`usable` bytes can be had; raises WrongSetting if one row takes more at its full length."""
    max_len = settings.max_model_len or model.context_length
    lazy = is_lazy(model.device)
    limits = KVLimits(
        max_rows=settings.max_batch_size or default_max_rows(model.free_memory()),
        max_len=max_len,
        first_len=min(max_len, _FIRST_LAZY_LEN if lazy else _FIRST_LEN),
        bytes_per_token=model.bytes_per_token,
        bytes_per_row=model.bytes_per_row,
        fixed_bytes=model.bytes_of_chunk(min(settings.prefill_chunk, max_len)),
        is_lazy=lazy,
    )
    if limits.num_bytes(1, max_len) > usable:
        chunk = limits.fixed_bytes
        logits = f", the logits of PREFILL_CHUNK={settings.prefill_chunk} {chunk:,}"
        raise WrongSetting(
            f"one request of {max_len} tokens takes {limits.num_bytes(1, max_len) - chunk:,} bytes "
            f"while it runs{logits if chunk else ''}, and {usable:,} can be had: lower "
            f"MAX_MODEL_LEN{' or PREFILL_CHUNK' if chunk else ''}"
        )
    return Arena(limits, usable)


def _versions() -> dict[str, str]:
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: installed[name] for name in _SHOWN_VERSIONS if name in installed}
