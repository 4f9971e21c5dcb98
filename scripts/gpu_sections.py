"""What gpu_check.py checks, a function each: options in, a report out, whose `ok` is the verdict.

They run in processes of their own. Only `--device cuda` tells them from what runs in the tests.
"""

import importlib.metadata
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import psutil
import torch
from compare_baseline import serving as server_of
from make_random_model import PHI3_MINI, PHI3_TINY, make_model

from app import cuda, device_sampler, runner
from app.config import read_settings
from app.engine import Engine, Unobserved
from app.graph import read_graph
from app.kv_cache import KVCache
from app.loading import LoadedModel, load
from app.model import OnnxModel
from app.sampler import sample
from app.sequence import PrefillChunk, SamplingParams, Sequence, StepPlan

Report = dict[str, Any]
# The default model's shape, SmolLM2-135M's, with Phi-3's vocabulary.
DEFAULT_SHAPE = PHI3_MINI | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
SHAPES = {"tiny": PHI3_TINY, "default": DEFAULT_SHAPE}
PRECISIONS = {"cuda": ("fp16", "int8"), "cpu": ("fp32", "int8")}
# Of the logits' spread: what rounding may do, where a wrong position does far more.
TOLERANCE = 0.05
GIB = 1 << 30
SCRIPTS = Path(__file__).parent


@dataclass(frozen=True)
class Options:
    device: str
    folders: dict[str, Path]  # by name
    work: Path  # to be written to
    quick: bool

    @property
    def some_folder(self) -> Path:
        return next(iter(self.folders.values()))


# --- environment, build ---------------------------------------------------------------------------


def environment(options: Options) -> Report:
    names = ("onnxruntime", "onnxruntime-gpu", "torch", "transformers", "optimum-onnx", "numpy")
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    found: Report = {
        "ok": True,
        "python": sys.version.split()[0],
        "versions": {name: installed[name] for name in names if name in installed},
        "torch_cuda": torch.version.cuda,
        "providers": ort.get_available_providers(),
        "gpu": None,
    }
    if options.device == "cuda":
        problem = cuda.find_problem()
        cuda.load_libraries()
        unloadable = cuda.find_unloadable()
        found |= {"torch_problem": problem, "unloadable": unloadable}
        found["ok"] = problem is None and unloadable is None
        if problem is None:
            gpu = torch.cuda.get_device_properties(0)
            found["gpu"] = {"name": gpu.name, "bytes": gpu.total_memory, "sm": gpu.major}
    return found


def build(options: Options) -> Report:
    """All at once: each takes one core for most of its time."""
    context = multiprocessing.get_context("fork")
    wanted = [*itertools.product(SHAPES, PRECISIONS[options.device])]
    builds = [context.Process(target=_build, args=(options, *each)) for each in wanted]
    for process in builds:
        process.start()
    for process in builds:
        process.join()
    names = sorted(built(options.work))
    return {"ok": len(names) == len(wanted), "folders": names}


def _build(options: Options, shape: str, precision: str) -> None:
    from quantize.build import build as build_folder
    from quantize.precision import choose
    from quantize.sources import resolve

    name = f"{shape}-{precision}"
    source, root = options.work / f"{name}-source", options.work / f"{name}-building"
    for folder in (source, root / "folder"):
        folder.mkdir(parents=True)
    make_model(source, SHAPES[shape], "float32")
    with resolve(str(source), root / "cache", root) as resolved:
        choice = choose(precision, options.device, allow_slow=True)
        build_folder(resolved, root / "folder", choice, gate=None)
    (root / "folder").rename(options.work / f"{name}.model")


def built(work: Path) -> dict[str, Path]:
    """The folders that are whole, by name."""
    return {folder.stem: folder for folder in sorted(work.glob("*.model"))}


# --- correctness ----------------------------------------------------------------------------------


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
    model = OnnxModel.load(folder, device, num_threads=2)
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


# --- in place, copies -----------------------------------------------------------------------------


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


# --- speed ----------------------------------------------------------------------------------------


def throughput(options: Options) -> Report:
    rows = (1, 2) if options.quick else (1, 8, 32, 128)
    results = []
    for name, folder in options.folders.items():
        engine, _ = load_engine(options, folder, "--max-batch-size", str(max(rows)))
        for number, temperature in itertools.product(rows, (0.0, 1.0)):
            with watched(options) as gpu:
                measured = measure(engine, number, temperature, 4 if options.quick else 64)
            results.append({"folder": name} | measured | {"gpu": gpu.told()})
        del engine
    return {"ok": all(not row["errors"] for row in results), "results": results}


def load_engine(options: Options, folder: Path, *arguments: str) -> tuple[Engine, LoadedModel]:
    """As the server does it."""
    length = "64" if options.quick else "512"
    arguments = ("--model", str(folder), "--device", options.device, *arguments)
    settings = read_settings([*arguments, "--max-model-len", length, "--threads", "2"])
    return load(read_graph(folder), settings, Unobserved(), lambda stage: None)


def measure(engine: Engine, num_rows: int, temperature: float, num_steps: int) -> Report:
    """Prompts of 32 tokens for every row, then `num_steps` steps of all rows together."""
    prompt_tokens = 32
    made = []
    for row in range(num_rows):
        # Rows begin one after the other; all must be there still when the last one is.
        params = SamplingParams(
            min(num_rows + num_steps + 4, 400), temperature=temperature, seed=row, ignore_eos=True
        )
        prompt = [3 + (row * 7 + place) % 250 for place in range(prompt_tokens)]
        made.append(Sequence(str(row), prompt, params))
        engine.submit(made[-1])
    started_at = time.perf_counter()
    while any(not sequence.output_ids and not sequence.is_finished for sequence in made):
        engine.step()
    prompts_done_at = time.perf_counter()
    times, num_tokens = [], 0
    for _ in range(num_steps):
        step_at = time.perf_counter()
        num_tokens += sum(advance.token_id is not None for advance in engine.step())
        times.append(time.perf_counter() - step_at)
    drain(engine, made)
    return {
        "rows": num_rows,
        "temperature": temperature,
        "tokens_per_second": round(num_tokens / sum(times), 1),
        "step_ms": round(1000 * statistics.median(times), 3),
        "prompts_seconds": round(prompts_done_at - started_at, 3),
        "errors": [sequence.error for sequence in made if sequence.error],
    }


def drain(engine: Engine, sequences: list[Sequence]) -> None:
    from app.sequence import FinishReason

    for sequence in sequences:
        if not sequence.is_finished:
            sequence.ended_by = FinishReason.ABORT
            engine.end(sequence)
    while not engine.is_idle:
        engine.step()


def serving(options: Options) -> Report:
    """The whole server, loaded over HTTP by bench.py."""
    clients, requests, tokens = ("2", "4", "8") if options.quick else ("32", "256", "64")
    metrics: list[dict[str, float]] = []
    arguments = ["--model", str(options.some_folder), "--device", options.device]
    bench = [sys.executable, str(SCRIPTS / "bench.py"), "--concurrency", clients]
    bench += ["--requests", requests, "--prompt-tokens", "24", "--output-tokens", tokens]
    with server_of("-m", "app", "--host", "127.0.0.1", *arguments) as server:
        command = [*bench, "--url", server.url]
        with watched(options) as gpu:
            load_run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            while load_run.poll() is None:
                metrics.append(read_metrics(server.url))
                time.sleep(0.2)
        beside = {"metrics": read_metrics(server.url), "nvml": gpu.told()}
        info = json.load(urllib.request.urlopen(f"{server.url}/info"))
    assert load_run.stdout is not None
    report = json.loads(load_run.stdout.read().splitlines()[-1])
    busy = [read["engine_busy_ratio"] for read in metrics if "engine_busy_ratio" in read]
    return {
        "ok": load_run.returncode == 0 and info["device"] == options.device,
        "provider": info["provider"],
        "load": report,
        "busy_ratio": {"max": max(busy), "median": statistics.median(busy)} if busy else None,
        **beside,
    }


def read_metrics(url: str) -> dict[str, float]:
    """Those without labels, that are about the machine or the step."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    wanted = ("engine_busy_ratio", "batch_limit", "gpu_", "kv_cache", "num_requests")
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    named = ((name.removeprefix("phi_serve_"), value) for name, value in pairs)
    return {name: float(value) for name, value in named if name.startswith(wanted)}


# --- memory ---------------------------------------------------------------------------------------


def memory(options: Options) -> Report:
    """Rows upon rows, each to its end, then a rest (FR29): nothing fails, and what is held
    afterwards is at most a tenth more than before."""
    limit = 0 if options.device == "cpu" else 6 * GIB
    batch = "2" if options.quick else "1024"
    at_start = used_bytes(options)
    engine, loaded = load_engine(
        options, options.some_folder, *("--max-batch-size", batch),
        *("--max-gpu-memory-bytes", str(limit)),
    )  # fmt: skip
    engine.self_test()
    before = used_bytes(options) - at_start
    num_rows, length = int(loaded.info["max_batch_size"]), int(loaded.info["max_model_len"])
    # One begins with each step: short prompts and long answers are in the batch together.
    params = SamplingParams(length - 9, temperature=1.0, ignore_eos=True)
    made = [Sequence(str(n), [5] * 8, params) for n in range(num_rows)]
    for sequence in made:
        engine.submit(sequence)
    peak, give_up_at = before, time.monotonic() + (5 if options.quick else 25)
    while not engine.is_idle and time.monotonic() < give_up_at:
        engine.step()
        peak = max(peak, used_bytes(options) - at_start)
    drain(engine, made)
    time.sleep(0 if options.quick else runner._REST_SECONDS + 1)
    engine.self_test()
    after = used_bytes(options) - at_start
    errors = [sequence.error for sequence in made if sequence.error]
    is_kept = limit == 0 or (peak <= limit and after <= 1.1 * before)
    return {
        "ok": not errors and is_kept,
        "rows": num_rows,
        "limit_bytes": limit,
        "bytes": {"before": before, "peak": peak, "after_rest": after},
        "errors": errors[:5],
    }


def used_bytes(options: Options) -> int:
    """Of the GPU, by anybody; on the CPU this process's."""
    if options.device == "cpu":
        return int(psutil.Process().memory_info().rss)
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


@dataclass
class Watch:
    """NVML's readings, ten a second; none where it is not there."""

    utilization: list[int] = field(default_factory=list)  # percent
    used: list[int] = field(default_factory=list)  # bytes

    def told(self) -> Report | None:
        if not self.used:
            return None
        return {
            "utilization_median": statistics.median(self.utilization),
            "utilization_max": max(self.utilization),
            "used_bytes_last": self.used[-1],
            "used_bytes_max": max(self.used),
        }


@contextmanager
def watched(options: Options) -> Iterator[Watch]:
    watch, stop = Watch(), threading.Event()
    thread = threading.Thread(target=_watch, args=(watch, stop))
    if options.device == "cuda":
        thread.start()
    try:
        yield watch
    finally:
        stop.set()
        if options.device == "cuda":
            thread.join()


def _watch(watch: Watch, stop: threading.Event) -> None:
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception as error:  # no library, no driver: what the report then lacks
        print(f"no NVML: {error}", file=sys.stderr)
        return
    while not stop.wait(0.1):
        watch.utilization.append(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        watch.used.append(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)
