"""Measure what choosing tokens costs beside the model's own decode step.

    python scripts/bench_sampler.py [--model models/default] [--rows 32] [--steps 32] [--repeats 5]
        [--vocab N] [--prompt-tokens 64] [--threads N] [--json FILE]

Loads a model folder, no server, and decodes --rows sequences at once, with the engine's own
scheduler, cache, model and sampler. In every step `model.forward` and `sampler.sample` are timed
beside each other. The mixes take turns, so that a machine that slows down for a minute slows all:

    greedy        temperature 0
    temperature   1.0, nothing else: the draw is from the whole vocabulary
    mixed         every row another combination: a quarter is greedy, a quarter wants
                  log-probabilities (of 0, 5 or 20 tokens beside each), and each of top_k, top_p,
                  min_p, the three penalties, logit_bias (10 or 300 tokens), banned tokens and
                  min_tokens is on in 2 rows of 5, dealt by chance and the same in every run
    everything    the worst case: nearly all of these in every row, log-probabilities in 21 of 22
    masked        temperature 1.0 and a grammar's mask on every row; making the mask is not counted

Milliseconds are medians of the repeats' medians; `share` is sampler / model, the median (min..
max) of the repeats. Prompts are pieces of the README of this repository. --vocab lets the sampler
see the first N logits of each row only; the model computes them all as before. With the defaults
and the default model it takes 2 minutes on 2 cores. The last line on stdout is one JSON object
with everything.
"""

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench
import click
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a script's own path is scripts/, not the root
from app import sequence as state  # noqa: E402 (needs the line above)
from app.kv_cache import KVCache  # noqa: E402
from app.machine import available_cpus  # noqa: E402
from app.model import OnnxModel  # noqa: E402
from app.sampler import sample  # noqa: E402
from app.scheduler import Scheduler  # noqa: E402
from app.text import TextCodec  # noqa: E402

PREFILL_CHUNK = 512
WARM_UP_STEPS = 2  # of each run, not counted
Masks = Mapping[int, NDArray[np.uint32]]


@dataclass(frozen=True)
class Bench:
    """What all runs have in common."""

    model: OnnxModel
    cache: KVCache
    prompts: list[list[int]]  # one per row
    num_steps: int
    vocab: int  # of the logits that the sampler sees

    @property
    def max_tokens(self) -> int:
        return self.num_steps + WARM_UP_STEPS + len(self.prompts) + 1  # the first row starts first


@dataclass
class Run:
    """One mix, once: seconds of each counted step."""

    model: list[float] = field(default_factory=list)
    sampler: list[float] = field(default_factory=list)


def greedy(row: int, vocab: int, max_tokens: int) -> state.SamplingParams:
    return state.SamplingParams(max_tokens, ignore_eos=True)


def temperature(row: int, vocab: int, max_tokens: int) -> state.SamplingParams:
    return state.SamplingParams(max_tokens, ignore_eos=True, temperature=1.0, seed=row)


def mixed(row: int, vocab: int, max_tokens: int) -> state.SamplingParams:
    dealt = random.Random(row)

    def sometimes(values: tuple[Any, ...], off: Any) -> Any:
        return dealt.choice(values) if dealt.random() < 0.4 else off

    num_biased = sometimes((10, 300), 0)
    return state.SamplingParams(
        max_tokens,
        ignore_eos=True,
        temperature=0.0 if row % 4 == 3 else dealt.choice((0.3, 0.7, 1.0, 1.5)),
        top_k=sometimes((20, 50, 1000), 0),
        top_p=sometimes((0.5, 0.9, 0.95), 1.0),
        min_p=sometimes((0.02, 0.05, 0.1), 0.0),
        repetition_penalty=sometimes((1.1, 1.3), 1.0),
        presence_penalty=sometimes((0.5, 1.5), 0.0),
        frequency_penalty=sometimes((0.5, -0.2), 0.0),
        logit_bias={i * 13 % vocab: -1.0 for i in range(num_biased)},
        banned_token_ids=sometimes(((1, 2, 3),), ()),
        stop_token_ids=frozenset({0}),
        min_tokens=sometimes((max_tokens,), 0),
        num_logprobs=(0, 5, 20)[row % 3] if row // 4 % 4 == 0 else None,
        seed=row,
    )


def everything(row: int, vocab: int, max_tokens: int) -> state.SamplingParams:
    """Lists of different lengths, so that rows differ in which values meet."""
    return state.SamplingParams(
        max_tokens,
        ignore_eos=True,
        temperature=(0.7, 1.0, 0.0, 1.5, 0.3)[row % 5],
        top_k=(0, 50, 0, 1000, 0, 20, 1)[row % 7],
        top_p=(0.95, 1.0, 0.9, 0.5)[row % 4],
        min_p=(0.0, 0.05, 0.0)[row % 3],
        repetition_penalty=(1.0, 1.1, 1.3)[row // 2 % 3],
        presence_penalty=(0.0, 0.5)[row // 3 % 2],
        frequency_penalty=(0.0, 0.5, -0.2)[row // 5 % 3],
        logit_bias={i * 13 % vocab: -1.0 for i in range((0, 10, 0, 300)[row // 4 % 4])},
        banned_token_ids=(1, 2, 3)[: row % 2 * 3],
        stop_token_ids=frozenset({0}),
        min_tokens=max_tokens,
        num_logprobs=(None, *range(21))[row % 22],
        seed=row,
    )


MIXES: dict[str, Callable[[int, int, int], state.SamplingParams]] = {
    "greedy": greedy,
    "temperature": temperature,
    "mixed": mixed,
    "everything": everything,
    "masked": temperature,
}


def make_masks(num_rows: int, vocab: int, rng: np.random.Generator) -> Masks:
    """About half of all tokens, in no order."""
    shape = (num_rows, -(-vocab // 32))
    return dict(enumerate(rng.integers(0, 2**32, shape, np.uint32)))


def measure(name: str, bench_: Bench, seed: int) -> Run:
    vocab, num_rows = bench_.vocab, len(bench_.prompts)
    scheduler = Scheduler(num_rows, bench_.cache.max_len, PREFILL_CHUNK, frozenset())
    for row, prompt in enumerate(bench_.prompts):
        params = MIXES[name](row, vocab, bench_.max_tokens)
        scheduler.add(state.Sequence(f"{name}-{row}", prompt, params))
    rng = np.random.default_rng(seed)
    run = Run()
    while len(run.model) < bench_.num_steps + WARM_UP_STEPS:
        plan = scheduler.plan()
        masks = make_masks(len(plan.sampled), vocab, rng) if name == "masked" else {}
        bench_.cache.apply(plan.moves)
        started_at = time.perf_counter()
        logits = bench_.model.forward(plan, bench_.cache)
        ran_at = time.perf_counter()
        sampled = sample(logits[:, :vocab], plan.sampled, masks)
        done_at = time.perf_counter()
        advances = scheduler.commit(plan, sampled)
        if errors := [advance.error for advance in advances if advance.error]:
            raise click.ClickException(errors[0])
        if plan.prefill is None:
            assert len(plan.decode) == num_rows
            run.model.append(ran_at - started_at)
            run.sampler.append(done_at - ran_at)
    return Run(run.model[WARM_UP_STEPS:], run.sampler[WARM_UP_STEPS:])


def summarize(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """All repeats of one mix."""
    model_ms, sampler_ms = (
        [round(1000 * statistics.median(getattr(run, part)), 3) for run in runs]
        for part in ("model", "sampler")
    )
    steps = list(itertools.chain.from_iterable(run.sampler for run in runs))
    shares = [round(ours / theirs, 4) for ours, theirs in zip(sampler_ms, model_ms, strict=True)]
    return {
        "mix": name,
        "model_ms": statistics.median(model_ms),
        "sampler_ms": statistics.median(sampler_ms),
        "sampler_p95_ms": round(1000 * bench.percentile(steps, 95), 3),
        "share": statistics.median(shares),
        "model_ms_runs": model_ms,
        "sampler_ms_runs": sampler_ms,
        "share_runs": shares,
    }


def table_row(row: dict[str, Any]) -> str:
    shares = row["share_runs"]
    share = f"{row['share']:.1%} ({min(shares):.1%}..{max(shares):.1%})"
    times = "".join(f"{row[key]:>15.2f}" for key in ("model_ms", "sampler_ms", "sampler_p95_ms"))
    return f"{row['mix']:12}{times}{share:>26}"


def prepare(
    folder: Path, threads: int, rows: int, steps: int, prompt_tokens: int, vocab: int | None
) -> Bench:
    model = OnnxModel.load(folder, "auto", threads)
    if vocab is not None and vocab > model.spec.vocab_size:
        raise click.ClickException(f"--vocab {vocab}: the model has {model.spec.vocab_size} tokens")
    needed = prompt_tokens + steps + WARM_UP_STEPS + rows + 1
    if needed > model.context_length:
        raise click.ClickException(
            f"--prompt-tokens, --steps and --rows need {needed} tokens a row, and the model has "
            f"{model.context_length}"
        )
    ids = TextCodec.load(folder).encode((ROOT / "README.md").read_text())
    starts = np.linspace(0, len(ids) - prompt_tokens, rows).astype(int).tolist()
    vocab = vocab or model.spec.vocab_size
    ids = [id_ % vocab for id_ in ids]  # penalties look at the prompt's tokens
    prompts = [ids[start : start + prompt_tokens] for start in starts]
    cache = KVCache(model.spec.kv, rows, needed, model.device)
    return Bench(model, cache, prompts, steps, vocab)


@click.command()
@click.option(
    "--model",
    default=ROOT / "models" / "default",
    help="A model folder; the default model's.",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option("--rows", default=32, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=32, show_default=True, type=click.IntRange(1), help="Per repeat.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@click.option("--vocab", type=click.IntRange(1), help="Logits per row; the model's vocabulary.")
@click.option("--prompt-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--threads", type=click.IntRange(1), help="The model's; the machine's cores.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
def main(
    model: Path,
    rows: int,
    steps: int,
    repeats: int,
    vocab: int | None,
    prompt_tokens: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Measure what choosing tokens costs beside the model's own decode step."""
    threads = threads or available_cpus()
    bench_ = prepare(model, threads, rows, steps, prompt_tokens, vocab)
    runs: dict[str, list[Run]] = {name: [] for name in MIXES}
    for repeat in range(repeats):
        for name, found in runs.items():
            click.echo(f"{name}, {repeat + 1} of {repeats}", err=True)
            found.append(measure(name, bench_, seed=repeat))
    results = [summarize(name, found) for name, found in runs.items()]
    titles = "".join(f"{title:>15}" for title in ("model ms", "sampler ms", "p95"))
    click.echo(f"{'mix':12}{titles}{'sampler / model':>26}")
    for row in results:
        click.echo(table_row(row))
    about = bench_.model.describe(model)
    config = {key: about[key] for key in ("model", "precision", "form", "vocab_size")}
    config |= {
        "vocab": bench_.vocab,
        "rows": rows,
        "steps": steps,
        "repeats": repeats,
        "threads": threads,
    }
    bench.publish(
        {"config": config | {"prompt_tokens": prompt_tokens}, "results": results}, json_file
    )


if __name__ == "__main__":
    main()
