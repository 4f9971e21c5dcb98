"""Take a model of Phi-3 Mini's true size from its files to answers, and record what that costs.

    python scripts/bench_phi3.py --work DIR [--like phi3-mini|phi3-tiny | --model HF_FOLDER]
        [--precision int8] [--concurrency 1,8] [--prompt-tokens 64] [--output-tokens 64]
        [--requests N] [--max-model-len 512] [--json FILE] [-- QUANTIZE_OPTIONS]

Makes a model with random weights (make_random_model.py; --model takes one that is there), runs
`python -m quantize` on it, serves what comes out and loads the server as bench.py does. DIR needs
room for the model, its fp32 graph and the result, all removed in the end: 28 GB for phi3-mini.
Random weights have random quality: QUANTIZE_OPTIONS may move the gate (--allow-quality-loss).

Memory is read from /proc ten times a second, of a process and all that it starts:

    peak_rss_bytes   largest resident memory of one process (VmHWM), mapped files included
    peak_anon_bytes  largest part of it that the system could not drop (RssAnon)

For a stage both are sums over the processes that ran at once. The report is the last line on
stdout and, unless --json says otherwise, docs/measurements/DATE-LIKE.json; all else is on stderr.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import date
from pathlib import Path
from random import Random
from typing import IO, Any

import bench
import click
import psutil
from compare_baseline import ROOT, serving

SAMPLE_SECONDS = 0.1
# How a line of `python -m quantize` begins -> the stage that begins with it.
STAGES = {
    "Reading": "reading weights",
    "Saving ONNX": "writing the fp32 graph",
    "quantizing": "quantizing",
    "comparing": "comparing with fp32",
    "measuring": "measuring speed",
}
MEMORY = {"VmHWM": "peak_rss_bytes", "VmRSS": "rss_bytes", "RssAnon": "anon_bytes"}
Memory = dict[str, int]


def read_memory(pid: int) -> Memory:
    """Resident memory of a process in bytes; empty if it has ended."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        found = re.findall(r"^(VmHWM|VmRSS|RssAnon):\s+(\d+) kB", status, re.M)
        return {MEMORY[name]: 1024 * int(kilobytes) for name, kilobytes in found}
    return {}


class Watch:
    """Samples a process and its children until it ends, stage by stage."""

    def __init__(self, pid: int, folder: Path, first_stage: str) -> None:
        self._root = psutil.Process(pid)
        self._folder = folder
        self._peaks: dict[tuple[int, str], Memory] = {}
        self._stages: list[dict[str, Any]] = []
        self._peak_disk = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.enter(first_stage)

    def enter(self, stage: str) -> None:
        if not self._stages or self._stages[-1]["stage"] != stage:
            began = {"stage": stage, "began_at": time.monotonic()}
            self._stages.append(began | {"peak_rss_bytes": 0, "peak_anon_bytes": 0})

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            with suppress(psutil.NoSuchProcess):
                self._sample([self._root, *self._root.children(recursive=True)])

    def _sample(self, processes: Sequence[psutil.Process]) -> None:
        rss = anon = 0
        for process in processes:
            memory = read_memory(process.pid)
            with suppress(psutil.Error):
                # A child has its parent's name, and memory, until it becomes its own program.
                key = process.pid, name_of(process.cmdline())
                peak = self._peaks.setdefault(key, {})
                peak |= {name: max(size, peak.get(name, 0)) for name, size in memory.items()}
            rss += memory.get("rss_bytes", 0)
            anon += memory.get("anon_bytes", 0)
        stage = self._stages[-1]
        stage["peak_rss_bytes"] = max(stage["peak_rss_bytes"], rss)
        stage["peak_anon_bytes"] = max(stage["peak_anon_bytes"], anon)
        self._peak_disk = max(self._peak_disk, size_of(self._folder))

    def report(self) -> dict[str, Any]:
        ends = [*(stage["began_at"] for stage in self._stages[1:]), time.monotonic()]
        stages = [
            {"stage": stage["stage"], "seconds": round(end - stage["began_at"], 1)}
            | {name: stage[name] for name in ("peak_rss_bytes", "peak_anon_bytes")}
            for stage, end in zip(self._stages, ends, strict=True)
        ]
        processes = [
            {"process": name, "peak_rss_bytes": peak["peak_rss_bytes"]}
            | {"peak_anon_bytes": peak["anon_bytes"]}
            for (_, name), peak in self._peaks.items()
            if peak
        ]
        return {
            "seconds": round(ends[-1] - self._stages[0]["began_at"], 1),
            "peak_rss_bytes": max((found["peak_rss_bytes"] for found in processes), default=0),
            "peak_disk_bytes": self._peak_disk,
            "stages": stages,
            "processes": processes,
        }


def name_of(command: Sequence[str]) -> str:
    """The module or script of a Python process: `quantize.speed`."""
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return Path(command[1] if len(command) > 1 else command[0]).name if command else "ended"


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # moved or removed since it was listed
            total += path.lstat().st_size
    return total


def file_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def read_lines(stream: IO[bytes]) -> Iterator[str]:
    """Lines as they come; a progress bar ends its own with a carriage return."""
    rest = b""
    while received := os.read(stream.fileno(), 65536):
        *lines, rest = re.split(rb"[\r\n]+", rest + received)
        yield from (line.decode(errors="replace").strip() for line in lines)
    yield rest.decode(errors="replace").strip()


def run_watched(arguments: Sequence[str], folder: Path, first_stage: str) -> dict[str, Any]:
    """Runs a Python command to its end and reports its time and memory."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    last_lines: deque[str] = deque(maxlen=10)
    watch = Watch(process.pid, folder, first_stage)
    assert process.stdout is not None
    try:
        with watch, process.stdout:
            for line in filter(None, read_lines(process.stdout)):
                click.echo(line, err=True)
                last_lines.append(line)
                for stage in (name for begins, name in STAGES.items() if line.startswith(begins)):
                    watch.enter(stage)
            process.wait()
    finally:
        process.kill()  # does nothing to a process that has ended
        process.wait()
    if process.returncode:
        shown = "\n".join(last_lines)
        raise click.ClickException(f"{' '.join(command)} ended with {process.returncode}:\n{shown}")
    return watch.report()


@contextmanager
def source_folder(model: Path | None, like: str, scratch: Path) -> Iterator[tuple[Path, Any]]:
    """The model to start from, and what making it has cost."""
    if model:
        yield model, None
        return
    folder = scratch / f"{like}-random"
    script = ["scripts/make_random_model.py", "--like", like, "--output", str(folder)]
    yield folder, run_watched(script, scratch, "making random weights")


def ask_info(url: str) -> Any:
    with closing(bench.connect(url)) as connection:
        connection.request("GET", "/info")
        return json.load(connection.getresponse())


def measure_server(
    folder: Path, concurrency: Sequence[int], requests: int | None, config: dict[str, Any]
) -> dict[str, Any]:
    """Serves `folder` and loads it; its memory before and after, and bench.py's rows."""
    arguments = ["-m", "app", "--model", str(folder), "--host", "127.0.0.1"]
    arguments += ["--max-model-len", str(config["max_model_len"])]
    started_at = time.monotonic()
    with serving(*arguments) as server:
        ready_seconds = round(time.monotonic() - started_at, 1)
        after_load = read_memory(server.pid)
        rng = Random(config["seed"])
        load = bench.Load(server.url, 0, config["output_tokens"], stream=True)
        load = bench.calibrate(load, config["prompt_tokens"], rng)
        rows = []
        for workers in concurrency:
            count = requests or max(8, 3 * workers)
            rows.append(bench.summarize(workers, [bench.measure(load, workers, count, rng)]))
            rows[-1]["server_memory"] = read_memory(server.pid)
            click.echo(bench.table_row(rows[-1]), err=True)
        info = ask_info(server.url)
    return {
        "ready_seconds": ready_seconds,
        "memory_after_load": after_load,
        "info": info,
        "results": rows,
    }


@click.command()
@click.option("--work", required=True, type=click.Path(path_type=Path), help="For large files.")
@click.option("--like", default="phi3-mini", show_default=True, help="For make_random_model.py.")
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="Take this HF folder.")
@click.option("--precision", default="int8", show_default=True)
@click.option("--concurrency", default="1,8", show_default=True, callback=bench.parse_concurrency)
@click.option("--prompt-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--output-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--requests", type=click.IntRange(1), help="Per concurrency; max(8, 3 x it).")
@click.option("--max-model-len", default=512, show_default=True, help="Of the server.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write it here.")
@click.argument("quantize_options", nargs=-1)
def main(
    work: Path,
    like: str,
    model: Path | None,
    precision: str,
    concurrency: list[int],
    requests: int | None,
    json_file: Path | None,
    quantize_options: tuple[str, ...],
    **config: int,
) -> None:
    """Take a model of Phi-3 Mini's size from its files to answers, and record what that costs."""
    if requests and requests < max(concurrency):
        raise click.BadParameter(f"{requests} requests cannot keep {max(concurrency)} workers busy")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all is stopped and removed
    work.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=work.resolve(), prefix="bench-phi3-") as scratch,
        source_folder(model and model.resolve(), like, Path(scratch)) as (source, made),
    ):
        output = Path(scratch) / precision
        arguments = [str(source), "--output", str(output), "--precision", precision]
        arguments += quantize_options
        pipeline = run_watched(["-m", "quantize", *arguments], Path(scratch), "starting")
        click.echo(json.dumps(pipeline), err=True)  # an hour's work, if the server should fail
        report = {
            "config": {"like": model.name if model else like, "precision": precision}
            | {"quantize_options": quantize_options, **config},
            "source": {"files": file_sizes(source), "making": made},
            "pipeline": pipeline,
            "folder": {"files": file_sizes(output)},
            "quantization": json.loads((output / "quantization.json").read_text()),
            "server": measure_server(output, concurrency, requests, config),
            "machine": {"memory_bytes": psutil.virtual_memory().total},
        }
    bench.publish(report, json_file or ROOT / f"docs/measurements/{date.today()}-{like}.json")
    sys.exit(any(row["failed"] for row in report["server"]["results"]))


if __name__ == "__main__":
    main()
