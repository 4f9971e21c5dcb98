"""Measure what a step costs beside the model: plan, masks, choosing tokens, commit, observe.

    python scripts/bench_host.py [--rows 1,8,32] [--vocab 32768] [--steps 100] [--repeats 5]
        [--json FILE]

The engine's own step, with a model that returns prepared logits at once, the server's metrics as
observer, and no cache. Two mixes of parameters, those of bench_sampler.py, take turns:

    greedy      temperature 0
    mixed       every row another combination of parameters, a quarter of them greedy

The logits are noise with a few hundred likelier tokens on top, others in every step, prompts 64
random tokens. `host ms` is the median of the repeats' medians, with the least and the most of them,
`limit` the aim of 0.3 ms and 20 us per row. The last line on stdout is one JSON object.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bench
import bench_sampler
import click
import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

sys.path.insert(0, str(Path(__file__).parents[1]))
from app.engine import Engine  # noqa: E402 (needs the line above)
from app.metrics import EngineMetrics, Metrics  # noqa: E402
from app.scheduler import Scheduler  # noqa: E402
from app.sequence import Move, Sequence, StepPlan  # noqa: E402

MIXES = ("greedy", "mixed")
NUM_PREPARED = 4  # steps; then the first again
PROMPT_TOKENS = 64
WARM_UP_STEPS = 5


class NoCache:
    def apply(self, moves: Iterable[Move]) -> None:
        pass


class NullModel:
    """Takes no time: its logits are there already. Notes when it was asked."""

    def __init__(self, rows: int, vocab: int, rng: np.random.Generator) -> None:
        noise = rng.normal(size=(NUM_PREPARED, rows, vocab)) * 2
        likely = rng.integers(0, vocab, (NUM_PREPARED, rows, min(300, vocab // 2)))
        raised = np.take_along_axis(noise, likely, 2) + np.linspace(3, 12, likely.shape[2])
        np.put_along_axis(noise, likely, raised, 2)
        self._logits = itertools.cycle(noise.astype(np.float32))

    def forward(self, plan: StepPlan, cache: NoCache) -> NDArray[np.float32]:
        return next(self._logits)[: len(plan.sampled)]


def measure(mix: str, rows: int, vocab: int, steps: int, seed: int) -> list[float]:
    """Seconds of each step."""
    rng = np.random.default_rng(seed)
    max_tokens = steps + WARM_UP_STEPS + rows + 1  # the first row starts first
    scheduler = Scheduler(rows, PROMPT_TOKENS + max_tokens, 512, frozenset())
    cache: Any = NoCache()
    engine = Engine(
        NullModel(rows, vocab, rng), cache, scheduler, EngineMetrics(Metrics(CollectorRegistry()))
    )
    for row in range(rows):
        prompt = rng.integers(0, vocab, PROMPT_TOKENS).tolist()
        params = bench_sampler.MIXES[mix](row, vocab, max_tokens)
        engine.submit(Sequence(f"{mix}-{row}", prompt, params))
    for _ in range(rows + WARM_UP_STEPS):
        engine.step()
    times = []
    for _ in range(steps):
        started_at = time.perf_counter()
        advances = engine.step()
        times.append(time.perf_counter() - started_at)
        if errors := [advance.error for advance in advances if advance.error]:
            raise click.ClickException(errors[0])
    return times


def summarize(mix: str, rows: int, runs: list[list[float]]) -> dict[str, Any]:
    medians = [round(1000 * statistics.median(run), 3) for run in runs]
    return {
        "mix": mix,
        "rows": rows,
        "host_ms": statistics.median(medians),
        "host_p95_ms": round(1000 * bench.percentile([*itertools.chain(*runs)], 95), 3),
        "limit_ms": round(0.3 + 0.02 * rows, 3),
        "host_ms_runs": medians,
    }


@click.command()
@click.option("--rows", default="1,8,32", show_default=True, callback=bench.parse_concurrency)
@click.option("--vocab", default=32768, show_default=True, type=click.IntRange(2))
@click.option("--steps", default=100, show_default=True, type=click.IntRange(1), help="Per repeat.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
def main(rows: list[int], vocab: int, steps: int, repeats: int, json_file: Path | None) -> None:
    """Measure what a step costs beside the model."""
    cases = [(mix, count) for mix in MIXES for count in rows]
    runs: dict[tuple[str, int], list[list[float]]] = {case: [] for case in cases}
    for repeat in range(repeats):
        for mix, count in cases:
            runs[mix, count].append(measure(mix, count, vocab, steps, seed=repeat))
    results = [summarize(*case, found) for case, found in runs.items()]
    click.echo(f"{'mix':8}{'rows':>6}{'host ms':>24}{'p95':>8}{'limit':>8}")
    for row in results:
        span = f"{row['host_ms']:.2f} ({min(row['host_ms_runs'])}..{max(row['host_ms_runs'])})"
        click.echo(
            f"{row['mix']:8}{row['rows']:>6}{span:>24}{row['host_p95_ms']:>8.2f}"
            f"{row['limit_ms']:>8.2f}"
        )
    config = {"vocab": vocab, "steps": steps, "repeats": repeats, "prompt_tokens": PROMPT_TOKENS}
    bench.publish({"config": config, "results": results}, json_file)


if __name__ == "__main__":
    main()
