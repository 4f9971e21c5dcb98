"""Sections of gpu_check.py about numbers: are they right, and where do they go."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from gpu_build import Options, Report

from app import cuda, device_sampler
from app.graph import read_graph
from app.kv_cache import KVCache
from app.machine import available_cpus
from app.model import OnnxModel
from app.sampler import sample
from app.sequence import PrefillChunk, SamplingParams, Sequence, StepPlan

# Of the logits' spread: what rounding may do, where a wrong position does far more.
TOLERANCE = 0.05


def correctness(options: Options) -> Report:
    found: Report = {}
    for name, folder in options.folders.items():
        ours, theirs = (read_logits(folder, device) for device in (options.device, "cpu"))
        worst = np.abs(ours - theirs).max() / (theirs.max() - theirs.min())
        found[name] = {
            "worst_share_of_spread": round(float(worst), 5),
            "same_top": round(float((ours.argmax(1) == theirs.argmax(1)).mean()), 4),
            "rows": len(ours),
        }
    found_same = sampled_the_same(options.device)
    is_close = all(each["worst_share_of_spread"] <= TOLERANCE for each in found.values())
    return {"ok": is_close and found_same, "logits": found, "sampler_agrees": found_same}


def read_logits(folder: Path, device: str, prompts: tuple[int, ...] = (33, 1, 60, 7)) -> Any:
    """Of prompts read in chunks, and of steps that decode them together; always the same tokens."""
    model = OnnxModel.load(folder, device, num_threads=available_cpus())
    rng = np.random.default_rng(0)
    cache = KVCache(model.spec.kv, len(prompts), 128, model.device)
    rows, logits = [], []
    for row, length in enumerate(prompts):
        ids = rng.integers(3, model.spec.vocab_size, length).tolist()
        sequence = Sequence(str(row), ids, SamplingParams(max_tokens=99))
        for start in range(0, length, 16):
            chunk = PrefillChunk(sequence, row, start, ids[start : start + 16])
            read = model.forward(StepPlan([], chunk, []), cache).copy()
        logits.append(read)
        sequence.num_cached = length
        rows.append(sequence)
    for _ in range(4):
        for sequence in rows:
            sequence.output_ids.append(int(rng.integers(3, model.spec.vocab_size)))
        logits.append(model.forward(StepPlan([], None, rows), cache).copy())
        for sequence in rows:
            sequence.num_cached += 1
    return np.concatenate(logits)


def sampled_the_same(device: str, num_rows: int = 64, vocab: int = 32_064) -> bool:
    """Tokens chosen on the device and on the host, of the same logits."""
    logits = np.random.default_rng(1).normal(size=(num_rows, vocab)).astype(np.float32) * 3
    kinds = (
        SamplingParams(99),
        SamplingParams(99, temperature=1.0, top_p=0.9),
        SamplingParams(99, temperature=0.7, top_k=40, min_p=0.02),
        SamplingParams(99, repetition_penalty=1.3, frequency_penalty=0.2),
    )

    def rows() -> list[Sequence]:
        return [Sequence(str(n), [n, n + 1], kinds[n % len(kinds)]) for n in range(num_rows)]

    there = device_sampler.sample(torch.from_numpy(logits).to(device), rows())
    return bool((there.token_ids == sample(logits, rows()).token_ids).all())


def in_place(options: Options) -> Report:
    """One column of each row is written, all else keeps its bits, at the addresses that it had."""
    found = {name: _writes(folder, options.device) for name, folder in options.folders.items()}
    return {"ok": all(found.values()), "one_column_written": found}


def _writes(folder: Path, device: str) -> bool:
    model = OnnxModel.load(folder, device, num_threads=2)
    cache = KVCache(model.spec.kv, 2, 64, model.device)
    rows = []
    for row, length in enumerate((9, 5)):
        sequence = Sequence(str(row), list(range(3, 3 + length)), SamplingParams(max_tokens=9))
        chunk = PrefillChunk(sequence, row, 0, sequence.prompt_ids)
        model.forward(StepPlan([], chunk, []), cache)
        sequence.num_cached, sequence.output_ids = length, [7]
        rows.append(sequence)
    before = [layer.clone() for layer in cache.layers]
    addresses = [layer.data_ptr() for layer in cache.layers]
    model.forward(StepPlan([], None, rows), cache)
    for layer, old in zip(cache.layers, before, strict=True):
        for row, sequence in enumerate(rows):
            column = sequence.num_cached
            if not layer[row, :, column].any():
                return False
            old[row, :, column] = layer[row, :, column]
        if not torch.equal(layer, old):
            return False
    return addresses == [layer.data_ptr() for layer in cache.layers]


def copies(options: Options) -> Report:
    """Each folder's nodes by provider, and those that copy, of a prompt and a decode step."""
    found = {name: _profile(folder, options) for name, folder in options.folders.items()}
    return {"ok": not any(each["copies"] for each in found.values()), "folders": found}


def _profile(folder: Path, options: Options) -> Report:
    graph = read_graph(folder)
    session_options = ort.SessionOptions()
    session_options.enable_profiling = True
    session_options.profile_file_prefix = str(options.work / folder.name)
    providers: list[Any] = ["CPUExecutionProvider"]
    if options.device == "cuda":
        cuda.load_libraries()
        cuda.prepare(session_options)
        providers = [(cuda.PROVIDER, cuda.provider_options(cuda.open_stream()))]
    session = ort.InferenceSession(graph.path, session_options, providers)
    model = OnnxModel(session, graph, 128)
    cache = KVCache(model.spec.kv, 1, 64, model.device)
    sequence = Sequence("one", [3, 4, 5], SamplingParams(max_tokens=9))
    model.forward(StepPlan([], PrefillChunk(sequence, 0, 0, sequence.prompt_ids), []), cache)
    sequence.num_cached, sequence.output_ids = 3, [7]
    model.forward(StepPlan([], None, [sequence]), cache)
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event["args"] for event in events if "op_name" in event.get("args", {})]
    ran = [node for node in ran if "provider" in node]
    nodes: dict[str, Counter[str]] = {}
    for node in ran:
        nodes.setdefault(node["provider"] or "none", Counter())[node["op_name"]] += 1
    return {
        "provider": model.provider,
        "nodes": {name: count.total() for name, count in nodes.items()},
        "on_cpu": dict(nodes.get("CPUExecutionProvider", {})) if options.device == "cuda" else {},
        "copies": sum(node["op_name"].startswith("Memcpy") for node in ran),
    }
