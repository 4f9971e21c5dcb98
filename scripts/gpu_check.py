"""Check the server on a GPU: numbers, memory, speed. What `gpu_check.sh` runs.

    python scripts/gpu_check.py [--device cuda|cpu] [--model NAME=FOLDER ...] [--quick]
        [--only SECTION,...] [--json FILE]

Without --model, folders with random weights are built on the spot: a tiny Phi-3 and the default
model's shape, each in fp16 and int8. Every section is a process with a time limit of its own, and
reports by itself: one that fails, crashes or hangs costs no other. With --device cpu and --quick
everything that needs no GPU runs in seconds, so that the tests can run it.

    environment  versions, the GPU, and whether ONNX Runtime really is on it
    build        the folders, unless they were given
    correctness  logits beside the CPU's, and tokens chosen there beside those chosen on the host
    in_place     a decode step writes one column of the cache, and nothing else
    copies       no copies between host and device within a run (profile), nodes by provider
    throughput   tokens/s at 1, 8, 32 and 128 rows, decode and prompt
    serving      the server under load: tokens/s, GPU utilization, busy ratio, metrics beside NVML
    memory       full to MAX_GPU_MEMORY_BYTES without an error, and given back after a rest

The exit status is 1 if a section is not ok. The last line on stdout is one JSON object; on a GPU it
is also written to docs/measurements/DATE-gpu.json.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import gpu_build  # noqa: E402 (needs the line above)
import gpu_numbers  # noqa: E402
import gpu_speed  # noqa: E402
from gpu_build import Options, Report  # noqa: E402
from load_report import machine  # noqa: E402

SECTIONS: dict[str, Callable[[Options], Report]] = {
    "environment": gpu_build.environment,
    "build": gpu_build.build,
    "correctness": gpu_numbers.correctness,
    "in_place": gpu_numbers.in_place,
    "copies": gpu_numbers.copies,
    "throughput": gpu_speed.throughput,
    "serving": gpu_speed.serving,
    "memory": gpu_speed.memory,
}
# Seconds of each; together less than gpu_check.sh's limit.
LIMITS = {
    "environment": 15,
    "build": 130,
    "correctness": 45,
    "in_place": 20,
    "copies": 25,
    "throughput": 90,
    "serving": 65,
    "memory": 65,
}


def run_limited(
    section: Callable[[Options], Report], options: Options, limit_seconds: float
) -> Report:
    """What `section` returns, from a process of its own; what became of it instead, if it does
    not."""
    started_at = time.monotonic()
    with started(section, options) as answer:
        found: Report = {"ok": False, "error": f"not done within {limit_seconds:g} s"}
        if answer.poll(limit_seconds):
            try:
                found = answer.recv()
            except EOFError:
                found = {"ok": False, "error": "the process died"}
    return found | {"seconds": round(time.monotonic() - started_at, 1)}


@contextmanager
def started(section: Callable[[Options], Report], options: Options) -> Iterator[Connection]:
    """Its process, and all that it started, has ended when the context closes."""
    # A fork, for imports take as long as a section. Nothing here has touched CUDA before.
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(section, options, theirs))
    process.start()
    theirs.close()
    pid = process.pid or 0
    with suppress(OSError):  # whoever is first, the child or this
        os.setpgid(pid, pid)
    try:
        yield ours
    finally:
        process.join(1)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        process.kill()
        process.join()


def _report(section: Callable[[Options], Report], options: Options, answer: Connection) -> None:
    os.setpgid(0, 0)  # a group of its own, to be ended as a whole
    os.dup2(2, 1)  # libraries print; the last line on stdout is ours
    try:
        found = section(options)
    except BaseException as error:
        traceback.print_exc()
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    answer.send(found)
    answer.close()


def read_folders(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, Path]:
    folders = {}
    for text in given:
        name, _, path = text.partition("=")
        if not (name and path and Path(path).is_dir()):
            raise click.BadParameter(f"{text!r} is not NAME=FOLDER")
        folders[name] = Path(path).resolve()
    return folders


def read_sections(_: click.Context, __: click.Parameter, text: str) -> list[str]:
    names = text.split(",") if text else list(LIMITS)
    if unknown := [name for name in names if name not in LIMITS]:
        raise click.BadParameter(f"no section {unknown[0]!r}; there are {', '.join(LIMITS)}")
    return names


@click.command()
@click.option("--device", default="cuda", show_default=True, type=click.Choice(["cuda", "cpu"]))
@click.option("--model", "folders", multiple=True, callback=read_folders, help="NAME=FOLDER.")
@click.option("--quick", is_flag=True, help="As little of everything as shows that it runs.")
@click.option("--only", "sections", default="", callback=read_sections, help="SECTION,...")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write it here.")
def main(
    device: str, folders: dict[str, Path], quick: bool, sections: list[str], json_file: Path | None
) -> None:
    """Check the server on a GPU: numbers, memory, speed."""
    if json_file is None and device == "cuda":
        json_file = ROOT / "docs" / "measurements" / f"{date.today()}-gpu.json"
    report: Report = {"device": device, "quick": quick, "machine": machine(), "sections": {}}
    with tempfile.TemporaryDirectory() as work:
        options = Options(device, folders, Path(work), quick)
        for name in sections:
            if name == "build" and folders:
                continue
            found = run_limited(SECTIONS[name], options, LIMITS[name])
            click.echo(f"{name:12} {found['seconds']:6.1f} s  {verdict(found)}", err=True)
            report["sections"][name] = found
            if name == "build":  # those that are whole
                options = Options(device, gpu_build.built(Path(work)), Path(work), quick)
            if json_file is not None:  # now: whatever comes next may take the machine along
                json_file.write_text(json.dumps(report) + "\n")
    click.echo(json.dumps(report))
    sys.exit(not all(found["ok"] for found in report["sections"].values()))


def verdict(found: Report) -> str:
    return "ok" if found["ok"] else f"NOT OK: {found.get('error', 'see the report')}"


if __name__ == "__main__":
    main()
