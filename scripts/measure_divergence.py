"""Measure how often an answer changes with the requests that run beside it.

    python scripts/measure_divergence.py FOLDER... [--probes 20] [--tokens 48] [--alone 5]
        [--threads 0] [--speed-steps 48] [--repeats 3] [--seed 0] [--json FILE]

Drives the engine itself, without HTTP. A probe is a prompt of random token ids (flat distributions,
where near ties are frequent), once greedy and once at temperature 1 with a fixed seed:

    alone      --alone times. A row alone is the same run with and without DETERMINISTIC, so these
               runs are made once and stand for both.
    in company once per setting, in a row that changes, with fillers: random prompts that join
               and leave at random steps, the same for both settings. The first probe has 1 at a
               time, the last up to 15.

A probe differs if an id of it does. `first_step` are the steps at which those first did;
`max_logit_difference` is over all steps up to there, so the ids before it are the same, and 0 says
that the logits are the same bit by bit. `mean_rows` tells how large the company was.

    tokens/s   of decode steps at 1, 8 and 32 rows, both settings in turns: median (min..max).
               --speed-steps 0 leaves it out, as --probes 0 leaves out the rest.

The default model takes about 5 minutes on 2 cores. The last line on stdout is one JSON object with
everything; progress goes to stderr.
"""

import dataclasses
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import bench
import click
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script's own path is scripts/, not the root
from app.engine import Engine, Unobserved  # noqa: E402 (needs the line above)
from app.errors import UnservableModel  # noqa: E402
from app.kv_cache import KVCache  # noqa: E402
from app.machine import available_cpus  # noqa: E402
from app.model import OnnxModel  # noqa: E402
from app.scheduler import Scheduler  # noqa: E402
from app.sequence import FinishReason, SamplingParams, Sequence, StepPlan  # noqa: E402

SETTINGS = {"default": False, "deterministic": True}
KINDS = {"greedy": 0.0, "seeded": 1.0}  # temperature
SPEED_ROWS = (1, 8, 32)
MAX_PROMPT = 96
MAX_FILLERS = 15
PREFILL_CHUNK = 64  # the longest prompts take two


@dataclass
class Heard:
    """What the model said to one sequence: logits of each of its steps, and rows that decoded."""

    logits: list[NDArray[np.float32]] = field(default_factory=list)  # each (vocab,)
    num_rows: list[int] = field(default_factory=list)


class Listener:
    """A model that also keeps what it says to `watched`."""

    def __init__(self, model: OnnxModel) -> None:
        self._model = model
        self.watched: Sequence | None = None
        self.heard = Heard()

    def watch(self, sequence: Sequence) -> None:
        self.watched, self.heard = sequence, Heard()

    def forward(self, plan: StepPlan, cache: KVCache) -> NDArray[np.float32]:
        logits = self._model.forward(plan, cache)
        for row, sequence in enumerate(plan.sampled):
            if sequence is self.watched:
                self.heard.logits.append(logits[row].copy())
                self.heard.num_rows.append(len(plan.decode))
        return logits


@dataclass(frozen=True)
class Result:
    """A probe beside its first run alone."""

    first_step: int | None  # at which its ids differ
    max_logit_difference: float
    mean_rows: float


class Bench:
    """A model with its engine: room for the probe and its company, or for the largest batch."""

    def __init__(self, folder: Path, threads: int, max_len: int) -> None:
        self.model = OnnxModel.load(folder, "auto", threads)
        self.max_len = min(max_len, self.model.context_length)
        self.listener = Listener(self.model)
        num_rows = max(SPEED_ROWS)
        cache = KVCache(self.model.spec.kv, num_rows, self.max_len, self.model.device)
        scheduler = Scheduler(num_rows, self.max_len, PREFILL_CHUNK, frozenset())
        self.engine = Engine(self.listener, cache, scheduler, Unobserved())

    def prompt(self, rng: random.Random, longest: int = MAX_PROMPT) -> list[int]:
        """Random ids; the last ones of a vocabulary may have no meaning to the model."""
        length = rng.randint(1, longest)
        return rng.choices(range(self.model.spec.vocab_size * 9 // 10), k=length)

    def alone(self, probe: Sequence) -> Heard:
        self.listener.watch(probe)
        self.engine.submit(probe)
        self.finish()
        return self.listener.heard

    def in_company(self, probe: Sequence, num_fillers: int, rng: random.Random) -> Heard:
        """Up to `num_fillers` at a time; nothing but `rng` says when they come and go."""
        self.listener.watch(probe)
        fillers: list[Sequence] = []
        starts_at = rng.randint(0, num_fillers)
        for step in itertools.count():
            if step == starts_at:
                self.engine.submit(probe)
            fillers = [filler for filler in fillers if not filler.is_finished]
            if len(fillers) < num_fillers and rng.random() < 0.7:
                params = SamplingParams(rng.randint(2, 40))
                fillers.append(Sequence("filler", self.prompt(rng), params))
                self.engine.submit(fillers[-1])
            self.engine.step()
            if probe.is_finished:
                break
        for filler in fillers:
            filler.ended_by = FinishReason.ABORT
        self.finish()
        return self.listener.heard

    def finish(self) -> None:
        while not self.engine.is_idle:
            self.engine.step()


def compare(probe: Sequence, heard: Heard, first: Sequence, said: Heard) -> Result:
    """`probe` beside `first`, its first run alone."""
    if probe.error or first.error:
        raise click.ClickException(f"a probe failed: {probe.error or first.error}")
    pairs = zip(probe.output_ids, first.output_ids, strict=True)
    step = next((i for i, (own, other) in enumerate(pairs) if own != other), None)
    end = len(said.logits) if step is None else step + 1
    both = zip(heard.logits[:end], said.logits[:end], strict=True)
    difference = max(float(np.abs(own - other).max()) for own, other in both)
    return Result(step, difference, statistics.mean(heard.num_rows))


def divergence(bench_: Bench, kind: str, sizes: "Sizes") -> dict[str, Any]:
    """All probes of one kind: alone, and in company with each setting."""
    found: dict[str, list[Result]] = {"alone": [], **{setting: [] for setting in SETTINGS}}
    for index in range(sizes.probes):
        prompt = bench_.prompt(random.Random(f"{sizes.seed}-{index}"))
        params = SamplingParams(sizes.tokens, temperature=KINDS[kind], seed=index)
        first = Sequence("probe", prompt, params)
        bench_.model.deterministic = False
        said = bench_.alone(first)
        for _ in range(sizes.alone - 1):
            probe = Sequence("probe", prompt, params)
            found["alone"].append(compare(probe, bench_.alone(probe), first, said))
        for setting, bench_.model.deterministic in SETTINGS.items():
            probe = Sequence("probe", prompt, params)
            rng = random.Random(f"company-{sizes.seed}-{index}")
            num_fillers = 1 + (MAX_FILLERS - 1) * index // max(1, sizes.probes - 1)
            heard = bench_.in_company(probe, num_fillers, rng)
            found[setting].append(compare(probe, heard, first, said))
    return {name: summarize(results) for name, results in found.items() if results}


def summarize(results: Ordered[Result]) -> dict[str, Any]:
    steps = [result.first_step for result in results if result.first_step is not None]
    return {
        "answers": len(results),
        "differ": len(steps),
        "share": round(len(steps) / len(results), 4),
        "first_step": sorted(steps),
        "max_logit_difference": max(result.max_logit_difference for result in results),
        "same_bits": sum(result.max_logit_difference == 0 for result in results),
        "mean_rows": round(statistics.mean(result.mean_rows for result in results), 2),
    }


def speed(bench_: Bench, sizes: "Sizes") -> list[dict[str, Any]]:
    """Decode tokens/s of both settings, in turns."""
    rates: dict[tuple[int, str], list[float]] = {}
    for _, num_rows in itertools.product(range(sizes.repeats), SPEED_ROWS):
        for setting, deterministic in SETTINGS.items():
            rate = decode_rate(bench_, num_rows, sizes.speed_steps, deterministic)
            rates.setdefault((num_rows, setting), []).append(rate)
    return [
        {"rows": num_rows, "setting": setting}
        | {"tokens_per_second": round(statistics.median(runs), 1)}
        | {"runs": [round(run, 1) for run in runs]}
        for (num_rows, setting), runs in rates.items()
    ]


def decode_rate(bench_: Bench, num_rows: int, num_steps: int, deterministic: bool) -> float:
    rng = random.Random(num_rows)
    longest = num_rows + num_steps + 1  # tokens that the first row has when the last has read
    sequences = [
        Sequence("row", bench_.prompt(rng, 16), SamplingParams(longest + 1))
        for _ in range(num_rows)
    ]
    for sequence in sequences:
        bench_.engine.submit(sequence)
    bench_.model.deterministic = False  # prompts are read faster
    while not sequences[-1].output_ids:
        bench_.engine.step()
    bench_.model.deterministic = deterministic
    started_at = time.perf_counter()
    for _ in range(num_steps):
        bench_.engine.step()
    seconds = time.perf_counter() - started_at
    for sequence in sequences:
        assert not sequence.is_finished, "it should have decoded all the time"
        sequence.ended_by = FinishReason.ABORT
    bench_.finish()
    return num_rows * num_steps / seconds


@dataclass(frozen=True)
class Sizes:
    probes: int
    tokens: int
    alone: int
    speed_steps: int
    repeats: int
    seed: int


def measure(folder: Path, threads: int, sizes: Sizes) -> dict[str, Any]:
    needed = max(MAX_PROMPT + sizes.tokens, 16 + max(SPEED_ROWS) + sizes.speed_steps + 3)
    bench_ = Bench(folder, threads, needed)
    if bench_.max_len < needed:
        raise click.ClickException(f"{folder}: {needed} tokens are more than its context")
    described = bench_.model.describe(folder)
    kept = ("model", "precision", "form", "provider")
    report = {"folder": folder.name} | {name: described[name] for name in kept}
    for kind in KINDS if sizes.probes else ():
        click.echo(f"{folder.name}: {kind} probes", err=True)
        report[kind] = divergence(bench_, kind, sizes)
    if sizes.speed_steps:
        click.echo(f"{folder.name}: speed", err=True)
        report["speed"] = speed(bench_, sizes)
    return report


def table(report: dict[str, Any]) -> list[str]:
    title = f"{report['folder']} ({report['precision']}, {report['form']})"
    lines = [f"{title:32}{'':8}{'differ':>12}{'first step':>12}{'max logits':>12}{'rows':>8}"]
    for kind in KINDS:
        for setting, row in report.get(kind, {}).items():
            share = f"{row['differ']} of {row['answers']}"
            step = min(row["first_step"], default="-")
            cells = f"{share:>12}{step:>12}{row['max_logit_difference']:>12.3g}"
            lines.append(f"{kind:16}{setting:16}{'':8}{cells}{row['mean_rows']:>8.1f}")
    for row in report.get("speed", []):
        runs = f"({min(row['runs']):.1f}..{max(row['runs']):.1f})"
        rate = f"{row['tokens_per_second']:.1f} {runs}"
        lines.append(f"{row['rows']:>3} rows        {row['setting']:16}{'tokens/s':8}{rate:>24}")
    return lines


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--probes", default=20, show_default=True, type=click.IntRange(0))
@click.option("--tokens", default=48, show_default=True, type=click.IntRange(1), help="Each.")
@click.option("--alone", default=5, show_default=True, type=click.IntRange(1))
@click.option(
    "--threads", default=0, show_default=True, type=click.IntRange(0), help="0: all CPUs."
)
@click.option("--speed-steps", default=48, show_default=True, type=click.IntRange(0))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Of speed.")
@click.option("--seed", default=0, show_default=True, help="Of prompts, joins and leaves.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
def main(folders: tuple[Path, ...], threads: int, json_file: Path | None, **sizes: int) -> None:
    """Measure how often an answer changes with the requests that run beside it."""
    threads, limits = threads or available_cpus(), Sizes(**sizes)
    try:
        reports = [measure(folder, threads, limits) for folder in folders]
    except UnservableModel as error:
        raise click.ClickException(str(error)) from error
    for report in reports:
        click.echo("\n".join(table(report)))
    config = {"threads": threads, "prefill_chunk": PREFILL_CHUNK} | dataclasses.asdict(limits)
    bench.publish({"config": config, "folders": reports}, json_file)


if __name__ == "__main__":
    main()
