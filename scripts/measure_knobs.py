"""Measure ONNX Runtime's knobs, one at a time, against what the server sets.

    python scripts/measure_knobs.py [--model models/default] [--knobs NAME,...] [--repeats 3]
        [--json FILE]

Each measurement is a process of its own, for some knobs hold for a whole process. Every knob is
measured right behind the default, `--repeats` times, and its ratios are taken within these pairs:
the machine's slow minutes are then in both. In a process, one session after the other:

    prefill    a prompt of 256 tokens, one row: median of several runs
    decode N   a step of N rows behind 64 tokens each: likewise
    memory     the process's resident size behind that, with the session for 32 rows, and its peak

A ratio is knob / default: of speed (above 1 is faster) and of memory (above 1 is more). With
`--json`, what FILE holds of other knobs stays, so that a long measurement can be taken in parts.
The last line on stdout is one JSON object.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench
import click
import numpy as np
import onnxruntime as ort

sys.path.insert(0, str(Path(__file__).parents[1]))
from quantize.decoding import Decoding  # noqa: E402 (needs the line above)

PREFILL_TOKENS, PROMPT_TOKENS = 256, 64
NUM_PREFILLS = 6
NUM_STEPS = {1: 48, 8: 32, 32: 20}  # by rows
SPEEDS = ("prefill", *(f"decode {rows}" for rows in NUM_STEPS))
MEMORIES = ("resident", "peak")


@dataclass(frozen=True)
class Knob:
    what: str
    session: Callable[[ort.SessionOptions], None] = lambda options: None
    run: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def entry(name: str, value: str) -> Callable[[ort.SessionOptions], None]:
    return lambda options: options.add_session_config_entry(name, value)


def attribute(name: str, value: Any) -> Callable[[ort.SessionOptions], None]:
    return lambda options: setattr(options, name, value)


def arena(**settings: int) -> Callable[[ort.SessionOptions], None]:
    """An arena of the process in place of the session's own."""

    def use(options: ort.SessionOptions) -> None:
        kind = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
        info = ort.OrtMemoryInfo("Cpu", kind, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(info, ort.OrtArenaCfg(settings))
        options.add_session_config_entry("session.use_env_allocators", "1")

    return use


DEFAULT = "default"
KNOBS = {
    DEFAULT: Knob("as the server sets it: a thread for each CPU"),
    "threads-1": Knob("one intra-op thread", attribute("intra_op_num_threads", 1)),
    "spinning-off": Knob(
        "idle threads sleep at once", entry("session.intra_op.allow_spinning", "0")
    ),
    "dynamic-blocks": Knob(
        "work is cut into ever smaller blocks", entry("session.dynamic_block_base", "4")
    ),
    "parallel": Knob(
        "execution mode: nodes beside one another",
        attribute("execution_mode", ort.ExecutionMode.ORT_PARALLEL),
    ),
    "arena-off": Knob("malloc for each tensor", attribute("enable_cpu_mem_arena", False)),
    "arena-next-power-of-two": Knob("the arena grows by doubling", arena(arena_extend_strategy=0)),
    "arena-same-as-requested": Knob(
        "the arena grows by what is asked for", arena(arena_extend_strategy=1)
    ),
    "arena-shrinkage": Knob(
        "behind each run the arena gives back",
        run={"memory.enable_memory_arena_shrinkage": "cpu:0"},
    ),
    "mem-pattern-off": Knob(
        "no plan of a shape's memory is kept", attribute("enable_mem_pattern", False)
    ),
    "prepacking-off": Knob(
        "weights stay as they lie in the file", entry("session.disable_prepacking", "1")
    ),
    "denormals-as-zero": Knob("", entry("session.set_denormal_as_zero", "1")),
    "huge-pages": Knob(
        "malloc asks for huge pages", environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    ),
}


def measure(folder: Path, knob: Knob) -> dict[str, float]:
    """Tokens/s, and bytes of this process."""

    def decoding(rows: int, max_len: int) -> Decoding:
        return Decoding(folder, rows, max_len, options=options, run_options=run_options)

    options, run_options = ort.SessionOptions(), ort.RunOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.inter_op_num_threads = 1
    knob.session(options)
    for name, value in knob.run.items():
        run_options.add_run_config_entry(name, value)
    rng = np.random.default_rng(0)
    opened = decoding(1, PREFILL_TOKENS)
    seconds = []
    for _ in range(1 + NUM_PREFILLS):
        opened.restart()
        seconds.append(timed(opened, rng.integers(3, 300, (1, PREFILL_TOKENS))))
    found = {"prefill": PREFILL_TOKENS / statistics.median(seconds[1:])}
    for rows, num_steps in NUM_STEPS.items():
        del opened  # one session at a time
        opened = decoding(rows, PROMPT_TOKENS + num_steps)
        opened.feed(rng.integers(3, 300, (rows, PROMPT_TOKENS)))
        steps = [timed(opened, rng.integers(3, 300, (rows, 1))) for _ in range(num_steps)]
        found[f"decode {rows}"] = rows / statistics.median(steps[2:])
    return found | {"resident": memory("VmRSS"), "peak": memory("VmHWM")}


def timed(opened: Decoding, ids: Any) -> float:
    started_at = time.perf_counter()
    opened.feed(ids)
    return time.perf_counter() - started_at


def memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def measure_apart(folder: Path, name: str) -> dict[str, float]:
    """In a process of its own."""
    command = [sys.executable, __file__, "--model", str(folder), "--worker", name]
    environment = os.environ | KNOBS[name].environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{name}: {done.stderr[-500:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def summarize(name: str, pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> Any:
    """`pairs` of the default and the knob."""
    keys = (*SPEEDS, *MEMORIES)
    return {
        "knob": name,
        "what": KNOBS[name].what,
        "ratio": {key: bench.spread([own[key] / base[key] for base, own in pairs]) for key in keys},
        "default": {key: bench.spread([base[key] for base, _ in pairs]) for key in keys},
        "measured": {key: bench.spread([own[key] for _, own in pairs]) for key in keys},
    }


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """In Markdown."""
    keys = (*SPEEDS, "resident")
    lines = [
        f"| knob | {' | '.join((*SPEEDS, 'memory'))} |",
        f"| --- |{' --- |' * len(keys)}",
    ]
    for row in results:
        spans = [row["ratio"][key] for key in keys]
        cells = [f"{s['median']:.2f} ({s['min']:.2f} to {s['max']:.2f})" for s in spans]
        what = f": {row['what']}" if row["what"] else ""
        lines.append(f"| `{row['knob']}`{what} | {' | '.join(cells)} |")
    return lines


def known_before(file: Path | None, names: Sequence[str]) -> list[dict[str, Any]]:
    if file is None or not file.exists():
        return []
    results: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    return [row for row in results if row["knob"] not in names]


def parse_knobs(_: click.Context, __: click.Parameter, text: str | None) -> list[str]:
    names = text.split(",") if text else [name for name in KNOBS if name != DEFAULT]
    if unknown := [name for name in names if name not in KNOBS]:
        raise click.BadParameter(f"{', '.join(unknown)}: there are {', '.join(KNOBS)}")
    return names


@click.command()
@click.option(
    "--model", default="models/default", show_default=True, type=click.Path(path_type=Path)
)
@click.option("--knobs", callback=parse_knobs, help="With commas between them; all by default.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
@click.option("--worker", hidden=True)
def main(
    model: Path, knobs: list[str], repeats: int, json_file: Path | None, worker: str | None
) -> None:
    """Measure ONNX Runtime's knobs, one at a time, against what the server sets."""
    if worker:
        click.echo(json.dumps(measure(model, KNOBS[worker])))
        return
    pairs: dict[str, list[Any]] = {name: [] for name in knobs}
    for _ in range(repeats):
        for name in knobs:
            pairs[name].append((measure_apart(model, DEFAULT), measure_apart(model, name)))
    results = [summarize(name, found) for name, found in pairs.items()]
    click.echo("\n".join(table(results)))
    order = list(KNOBS)
    results = sorted(
        [*known_before(json_file, knobs), *results], key=lambda row: order.index(row["knob"])
    )
    config = {"prefill_tokens": PREFILL_TOKENS, "prompt_tokens": PROMPT_TOKENS, "steps": NUM_STEPS}
    about = {"onnxruntime": ort.__version__, "repeats": repeats}
    bench.publish({"config": config | about, "results": results}, json_file)


if __name__ == "__main__":
    main()
