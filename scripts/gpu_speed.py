"""Sections of gpu_check.py about speed and memory, with the engine alone and with the server."""

import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from compare_baseline import serving as server_of
from gpu_build import Options, Report

from app import runner
from app.config import read_settings
from app.engine import Engine, Unobserved
from app.graph import read_graph
from app.loading import LoadedModel, load
from app.sequence import FinishReason, SamplingParams, Sequence

GIB = 1 << 30
SCRIPTS = Path(__file__).parent


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
    # A prompt is read in one step, however long the rows' steps are: else the first rows would have
    # ended before the last ones begin.
    arguments += ("--max-model-len", length, "--threads", "2", "--prefill-stall", "0")
    settings = read_settings([*arguments])
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
    engine.rest()  # as the bridge does it, KV_IDLE_SECONDS later
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
