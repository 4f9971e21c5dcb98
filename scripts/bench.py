"""Measure a running server under load: ours, or any that speaks OpenAI's API.

    python scripts/bench.py --url http://127.0.0.1:8080 --concurrency 1,8,32 --prompt-tokens 64 \\
        --output-tokens 64 [--requests N] [--repeats 1] [--no-stream] [--seed N] [--json FILE]
    python scripts/bench.py --rate 2,4,8                     # open loop, requests a second
    python scripts/bench.py --api chat --turns 5             # conversations, TTFT by turn
    python scripts/bench.py --prompt-tokens 64,512 --output-tokens 16,64 [--mix]
    python scripts/bench.py --api completions --shared-prefix-tokens 512 --url http://HOST:PORT

Closed loop (--concurrency): N clients, each sending its next request when its last is answered: N
patient clients, not a crowd that keeps arriving. Open loop (--rate): that crowd; arrivals are a
Poisson process, and latencies count from the planned instant, so a client that is late hides no
waiting. Several lengths give a row for each pair, or with --mix one load of all of them. Warm-up
requests are not counted. Answers are greedy and exactly --output-tokens long: a request that fails
or ends early is named, left out of all numbers, and makes the exit status 1.

    tokens/s   generated tokens (from `usage`) / time from the first send to the last byte. The last
               requests run beside fewer than N others; more requests lessen that.
               With --repeats: the median (min..max). in/s: likewise, of the prompts
    TTFT       from sending the request to the first event that carries text, seen by the client
    ITL        gaps between the events of one request that carry text
    e2e        from sending the request to the last byte of its answer
    client     share of one core that this client took (it shares the machine with the server)

With --no-stream there are no events: TTFT and ITL are null. The last line on stdout is one JSON
object with everything. What is sent: workload.py; how: load_client.py; numbers: load_report.py.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from dialects import PATHS, Target
from load_client import Answer, LoadClient, Run
from load_report import (
    TABLE,
    TITLES,
    connect,
    percentile,
    publish,
    server_facts,
    spread,
    summarize,
    table_row,
)
from workload import (
    ProbeFailed,
    Shape,
    arrivals,
    fit,
    make_conversations,
    make_prompts,
    run_closed,
    run_open,
    single_token_words,
)

# What other scripts take from here.
__all__ = ["TABLE", "TITLES", "Answer", "Load", "calibrate", "connect", "make_prompts", "measure"]
__all__ += ["parse_concurrency", "percentile", "publish", "spread", "summarize", "table_row"]

OPEN_LOOP_WARMERS = 4  # clients that warm the server up for a crowd
OPEN_LOOP_SECONDS = 15  # of arrivals, unless --requests says otherwise
MIN_OPEN_REQUESTS = 20


@dataclass(frozen=True)
class Load:
    """What every request of a run has in common, for the scripts that measure one shape."""

    url: str
    words: int  # per prompt
    output_tokens: int
    stream: bool


def calibrate(load: Load, prompt_tokens: int, rng: random.Random) -> Load:
    """Probe how many tokens the server counts in a prompt, and fit the words to it."""
    try:
        words = fit(Target(load.url), prompt_tokens, rng).words(prompt_tokens)
    except ProbeFailed as error:
        raise click.ClickException(str(error)) from error
    return Load(load.url, words, load.output_tokens, load.stream)


def measure(load: Load, concurrency: int, requests: int, rng: random.Random) -> Run:
    """A closed loop of one shape; one warm-up request per client is not counted."""
    shape = Shape(load.words, load.output_tokens)
    target = Target(load.url, stream=load.stream)
    return Workload(target, [shape]).run_closed(concurrency, requests, rng)


@dataclass(frozen=True)
class Workload:
    """What is sent in one row of the table, at any concurrency or rate."""

    target: Target
    shapes: Sequence[Shape]  # drawn at random if several
    prefix: str = ""
    words: Sequence[str] = ()
    warm_up: int = 1
    retry_429: bool = False

    def run_closed(self, concurrency: int, count: int, rng: random.Random) -> Run:
        with LoadClient(self.target.url, self.retry_429) as client:
            said = self._make(rng, count)
            run_closed(client, self.target, concurrency, self._make(rng, concurrency, self.warm_up))
            return run_closed(client, self.target, concurrency, said)

    def run_open(self, rate: float, count: int, rng: random.Random) -> Run:
        with LoadClient(self.target.url, self.retry_429) as client:
            said, instants = self._make(rng, count), arrivals(rng, rate, count)
            warm = self._make(rng, OPEN_LOOP_WARMERS, self.warm_up)
            run_closed(client, self.target, OPEN_LOOP_WARMERS, warm)
            return run_open(client, self.target, instants, said)

    def _make(self, rng: random.Random, count: int, times: int = 1) -> list[Any]:
        return make_conversations(rng, self.shapes, count * times, self.prefix, self.words)


def parse_list(
    number: Callable[[str], Any], example: str
) -> Callable[[click.Context, click.Parameter, str | None], list[Any]]:
    def parse(_: click.Context, __: click.Parameter, text: str | None) -> list[Any]:
        try:
            numbers = [number(part) for part in text.split(",")] if text else []
        except ValueError:
            numbers = [0]
        if not all(0 < given < float("inf") for given in numbers):
            wanted = f"give positive numbers with commas between them, like {example}"
            raise click.BadParameter(wanted)
        return numbers

    return parse


parse_concurrency = parse_list(int, "1,8,32")


def parse_object(_: click.Context, __: click.Parameter, text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise click.BadParameter("give a JSON object")
    return fields


def make_workloads(target: Target, rng: random.Random, asked: dict[str, Any]) -> list[Workload]:
    """One for each pair of lengths; with --mix one of them all.

    Raises: ProbeFailed
    """
    words = single_token_words(asked["tokenizer"]) if asked["tokenizer"] else ()
    shared = asked["shared_prefix_tokens"]
    found = fit(target, shared + max(asked["prompt_tokens"]), rng, words)
    num_shared = round(shared / found.per_word)
    prefix = make_prompts(rng, num_shared, 1, words)[0] if num_shared else ""
    shapes = [
        Shape(found.words(shared + tokens) - num_shared, output, shared + tokens, asked["turns"])
        for tokens, output in product(asked["prompt_tokens"], asked["output_tokens"])
    ]
    rest = (prefix, words, asked["warm_up"], asked["on_429"] == "retry")
    cases = [shapes] if asked["mix"] else [[shape] for shape in shapes]
    return [Workload(target, case, *rest) for case in cases]


def measure_all(
    workload: Workload, rng: random.Random, asked: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each rate, or else for each concurrency; printed as they come."""
    rows = []
    for rate in asked["rate"]:
        count = asked["requests"] or max(MIN_OPEN_REQUESTS, round(OPEN_LOOP_SECONDS * rate))
        runs = [workload.run_open(rate, count, rng) for _ in range(asked["repeats"])]
        rows.append(summarize(None, runs, rate))
        click.echo(table_row(rows[-1]))
    for clients in () if rows else asked["concurrency"]:
        count = asked["requests"] or max(8, 3 * clients)
        runs = [workload.run_closed(clients, count, rng) for _ in range(asked["repeats"])]
        rows.append(summarize(clients, runs))
        click.echo(table_row(rows[-1]))
    about = [
        {"prompt_tokens": s.prompt_tokens, "output_tokens": s.output_tokens, "words": s.words}
        for s in workload.shapes
    ]
    return [row | {"shapes": about} for row in rows]


def has_failed(row: dict[str, Any], on_429: str) -> bool:
    """Refusals are no failure where they are counted on purpose."""
    return any(kind != "http_429" or on_429 != "count" for kind in row["errors"])


lengths = parse_list(int, "64,512")


@click.command()
@click.option("--url", default="http://127.0.0.1:8080", show_default=True)
@click.option("--api", default="generate", show_default=True, type=click.Choice(list(PATHS)))
@click.option("--model", help="Name in OpenAI's requests; default: the first of /v1/models.")
@click.option("--extra", default="{}", callback=parse_object, help="JSON: more fields, or others.")
@click.option("--concurrency", default="1,8,32", show_default=True, callback=parse_concurrency)
@click.option("--rate", callback=parse_list(float, "0.5,2"), help="Open loop: requests a second.")
@click.option("--prompt-tokens", default="64", show_default=True, callback=lengths)
@click.option("--output-tokens", default="64", show_default=True, callback=lengths)
@click.option("--mix", is_flag=True, help="All lengths in one load, drawn at random.")
@click.option("--shared-prefix-tokens", default=0, type=click.IntRange(0), help="Before each.")
@click.option("--turns", default=1, show_default=True, type=click.IntRange(1))
@click.option(
    "--requests", type=click.IntRange(1), help="Conversations a row; max(8, 3 x clients)."
)
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1))
@click.option("--warm-up", default=1, show_default=True, type=click.IntRange(0), help="A client.")
@click.option(
    "--on-429",
    default="fail",
    show_default=True,
    type=click.Choice(["fail", "count", "retry"]),
    help="count: apart, no failure; retry: after Retry-After.",
)
@click.option("--no-stream", is_flag=True, help="Ask for one JSON answer instead of events.")
@click.option("--may-end-early", is_flag=True, help="For servers that do not know ignore_eos.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Folder: words of one token.")
@click.option("--seed", type=int, help="Of the prompts; new each time, so no cache knows them.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
def main(json_file: Path | None, **asked: Any) -> None:
    """Measure a running server under load."""
    url, requests = asked["url"], asked["requests"]
    if urlsplit(url).scheme != "http":
        raise click.BadParameter(f"{url} is not an http:// address", param_hint="--url")
    if requests and not asked["rate"] and requests < (most := max(asked["concurrency"])):
        raise click.BadParameter(f"{requests} requests cannot keep {most} workers busy")
    seed = asked["seed"] = time.time_ns() % 2**32 if asked["seed"] is None else asked["seed"]
    rng, facts = random.Random(seed), server_facts(url)
    model = asked["model"] or facts.get("model_id", "default")
    how = (not asked["no_stream"], model, asked["extra"], asked["may_end_early"])
    try:
        workloads = make_workloads(Target(url, asked["api"], *how), rng, asked)
    except ProbeFailed as error:
        raise click.ClickException(str(error)) from error

    click.echo(TABLE.format(*TITLES))
    results = [row for workload in workloads for row in measure_all(workload, rng, asked)]
    config = {name: str(v) if isinstance(v, Path) else v for name, v in asked.items()}
    config |= {"stream": not asked["no_stream"], "open_loop": bool(asked["rate"])}
    publish({"config": config, "server": facts, "results": results}, json_file)
    sys.exit(any(has_failed(row, asked["on_429"]) for row in results))


if __name__ == "__main__":
    main()
