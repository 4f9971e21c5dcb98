"""Measure a running server under a closed loop of requests.

    python scripts/bench.py --url http://127.0.0.1:8080 --concurrency 1,8,32 --prompt-tokens 64 \\
        --output-tokens 64 [--requests N] [--repeats 1] [--no-stream] [--seed N] [--json FILE]

Closed loop: N workers, each with its own kept-alive connection, each sending its next request when
its last one is answered: N patient clients, not a crowd that keeps arriving. One warm-up request
per worker is not counted. Every prompt is a different random sequence of short words, so a prefix
cache gains nothing; a probe request finds how many words make --prompt-tokens. Answers are greedy
and exactly --output-tokens long: a request that fails or ends early is named, left out of all
numbers, and makes the exit status 1.

    tokens/s   generated tokens (from `usage`) / time from the first send to the last byte. The last
               requests run beside fewer than N others; more requests lessen that.
               With --repeats: the median (min..max).
    TTFT       from sending the request to the first event that carries text, seen by the client
    ITL        gaps between the events of one request that carry text
    e2e        from sending the request to the last byte of its answer

Latencies are pooled over the repeats; percentiles are by nearest rank, so p99 of fewer than 100
values is their maximum. With --no-stream there are no events: TTFT and ITL are null. The last line
on stdout is one JSON object with everything. The client shares the machine with the server, so it
uses plain threads, which cost it less than asyncio's streams.
"""

import http.client
import json
import math
import os
import platform
import random
import re
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

TIMEOUT_SECONDS = 300  # of silence: a server that hangs must not hang the benchmark
SHORT_WORDS = (
    "air all and arm art ask bad bag bar bed big box boy bus but buy car cat cold cup cut day dog "
    "door dry ear eat egg end eye face fall far fast fish fly food for free full fun game girl go "
    "good half hand hat head help high home hot how ice job key land last left life light line "
    "long look lost love man map men milk moon more move name near new night now off oil old one"
)
TABLE = "{:>11} {:>8} {:>6} {:>24} {:>22} {:>20} {:>28}"
TITLES = ("concurrency", "requests", "prompt", "tokens/s", "TTFT p50/p95/p99", "ITL", "e2e ms")


class RequestFailed(Exception):
    """The server answered, but not with what was asked for."""


@dataclass(frozen=True)
class Load:
    """What every request of a run has in common."""

    url: str
    words: int  # per prompt
    output_tokens: int
    stream: bool


@dataclass
class Answer:
    """One request as the client saw it; `failure` says why it does not count."""

    sent_at: float
    done_at: float = 0.0
    text_at: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failure: str = ""


def take_events(received: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Split received SSE bytes into the events of the finished lines, and the unfinished rest."""
    *lines, rest = received.split(b"\n")
    return [json.loads(line[5:]) for line in lines if line.startswith(b"data:")], rest


def percentile(values: Sequence[float], percent: float) -> float:
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {f"p{p}": round(1000 * percentile(seconds, p), 3) for p in (50, 95, 99)}


def tokens_per_second(answers: Sequence[Answer]) -> float:
    wall_seconds = max(a.done_at for a in answers) - min(a.sent_at for a in answers)
    return sum(a.completion_tokens for a in answers if not a.failure) / wall_seconds


def summarize(concurrency: int, runs: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Reduce the repeats of one concurrency to the numbers of one row."""
    answers = list(chain.from_iterable(runs))
    good = [a for a in answers if not a.failure]
    rates = [round(tokens_per_second(run), 2) for run in runs]
    gaps = [later - earlier for a in good for earlier, later in pairwise(a.text_at)]
    return {
        "concurrency": concurrency,
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "failures": dict(Counter(a.failure for a in answers if a.failure).most_common()),
        "mean_prompt_tokens": round(sum(a.prompt_tokens for a in good) / max(1, len(good)), 1),
        "completion_tokens": sum(a.completion_tokens for a in good),
        "tokens_per_second": round(statistics.median(rates), 2),
        "tokens_per_second_runs": rates,
        "ttft_ms": percentiles_ms([a.text_at[0] - a.sent_at for a in good if a.text_at]),
        "itl_ms": percentiles_ms(gaps),
        "e2e_ms": percentiles_ms([a.done_at - a.sent_at for a in good]),
    }


def table_row(row: dict[str, Any]) -> str:
    times = [row["ttft_ms"], row["itl_ms"], row["e2e_ms"]]
    cells = ["/".join(f"{ms:.1f}" for ms in t.values()) if t else "-" for t in times]
    rates = row["tokens_per_second_runs"]
    spread = f" ({min(rates):.1f}..{max(rates):.1f})" if len(rates) > 1 else ""
    rate = f"{row['tokens_per_second']:.1f}{spread}"
    counts = (row["concurrency"], row["requests"], row["mean_prompt_tokens"])
    failures = [f"\n{'FAILED':>11} {n} x {failure}" for failure, n in row["failures"].items()]
    return TABLE.format(*counts, rate, *cells) + "".join(failures)


def ask(connection: http.client.HTTPConnection, load: Load, prompt: str) -> Answer:
    """Send one request and read its whole answer."""
    body = {"prompt": prompt, "max_tokens": load.output_tokens, "stream": load.stream}
    payload = json.dumps(body | {"ignore_eos": True, "temperature": 0})
    path = urlsplit(load.url).path.rstrip("/") + "/generate"
    answer = Answer(sent_at=time.perf_counter())
    try:
        connection.request("POST", path, payload, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            if response.status != 200:
                text = response.read().decode(errors="replace")
                raise RequestFailed(f"HTTP {response.status}: {text[:200].strip()}")
            last = read_stream(response, answer) if load.stream else json.load(response)
        answer.prompt_tokens = last["usage"]["prompt_tokens"]
        answer.completion_tokens = last["usage"]["completion_tokens"]
        if answer.completion_tokens != load.output_tokens:
            got = f"{answer.completion_tokens} tokens instead of {load.output_tokens}"
            raise RequestFailed(f"{got}, finish_reason {last.get('finish_reason')}")
    except Exception as error:  # whatever it was, this request failed and the others go on
        connection.close()  # half an answer may be left in it; the next request opens it again
        answer.failure = f"{type(error).__name__}: {error}"
    answer.done_at = time.perf_counter()
    return answer


def read_stream(response: http.client.HTTPResponse, answer: Answer) -> dict[str, Any]:
    """Stamp every event that carries text; return the last event."""
    rest, last = b"", {}
    while received := response.read1(65536):
        now = time.perf_counter()
        events, rest = take_events(rest + received)
        for last in events:
            if "error" in last:
                raise RequestFailed(f"error event: {last['error'].get('message', last['error'])}")
            if last["text"]:
                answer.text_at.append(now)
    if "usage" not in last:
        raise RequestFailed("the stream ended without a last event")
    return last


def connect(url: str) -> http.client.HTTPConnection:
    """Prepare a connection, opened by its first request (http.client sets TCP_NODELAY)."""
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_SECONDS)


def make_prompts(rng: random.Random, length: int, count: int) -> list[str]:
    words = SHORT_WORDS.split()
    return [" ".join(rng.choices(words, k=length)) for _ in range(count)]


def calibrate(load: Load, prompt_tokens: int, rng: random.Random) -> Load:
    """Probe how many tokens the server counts in a prompt, and fit the words to it."""
    [prompt] = make_prompts(rng, prompt_tokens, 1)
    with closing(connect(load.url)) as connection:
        probe = ask(connection, replace(load, output_tokens=1, stream=False), prompt)
    if probe.failure:
        raise click.ClickException(f"the probe request to {load.url} failed: {probe.failure}")
    return replace(load, words=max(1, round(prompt_tokens * prompt_tokens / probe.prompt_tokens)))


def measure(load: Load, concurrency: int, requests: int, rng: random.Random) -> list[Answer]:
    """Warm every worker up, then let them all take requests until none is left."""
    prompts = iter(make_prompts(rng, load.words, requests))
    all_warm = threading.Barrier(concurrency)

    def work(warm_up: str) -> list[Answer]:
        with closing(connect(load.url)) as connection:
            ask(connection, load, warm_up)
            all_warm.wait()
            return [ask(connection, load, prompt) for prompt in prompts]

    with ThreadPoolExecutor(concurrency) as pool:
        try:
            answers = pool.map(work, make_prompts(rng, load.words, concurrency))
            return list(chain.from_iterable(answers))
        finally:
            deque(prompts, maxlen=0)  # an interrupted run stops after the requests under way


def publish(report: dict[str, Any], json_file: Path | None) -> None:
    """Print the report as one line of JSON, with where and when the numbers were taken."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search("model name.*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    cpu = model[1] if model else platform.processor() or platform.machine()
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    client = {"cpu": cpu, "cores": os.cpu_count(), "date": date}
    line = json.dumps(report | {"client": client})
    if json_file:
        json_file.write_text(line + "\n")
    click.echo(line)


def parse_concurrency(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise click.BadParameter("give positive numbers with commas between them, like 1,8,32")
    return [int(number) for number in numbers]


@click.command()
@click.option("--url", default="http://127.0.0.1:8080", show_default=True)
@click.option("--concurrency", default="1,8,32", show_default=True, callback=parse_concurrency)
@click.option("--prompt-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--output-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--requests", type=click.IntRange(1), help="Per concurrency; max(8, 3 x it).")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1))
@click.option("--no-stream", is_flag=True, help="Ask for one JSON answer instead of events.")
@click.option("--seed", type=int, help="Of the prompts; new each time, so no cache knows them.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
def main(
    url: str,
    concurrency: list[int],
    prompt_tokens: int,
    output_tokens: int,
    requests: int | None,
    repeats: int,
    no_stream: bool,
    seed: int | None,
    json_file: Path | None,
) -> None:
    """Measure a running server under a closed loop of requests."""
    if urlsplit(url).scheme != "http":
        raise click.BadParameter(f"{url} is not an http:// address", param_hint="--url")
    if requests and requests < max(concurrency):
        raise click.BadParameter(f"{requests} requests cannot keep {max(concurrency)} workers busy")
    seed = time.time_ns() % 2**32 if seed is None else seed
    rng = random.Random(seed)
    load = calibrate(Load(url, 0, output_tokens, not no_stream), prompt_tokens, rng)

    click.echo(TABLE.format(*TITLES))
    results = []
    for workers in concurrency:
        count = requests or max(8, 3 * workers)
        runs = [measure(load, workers, count, rng) for _ in range(repeats)]
        results.append(summarize(workers, runs))
        click.echo(table_row(results[-1]))

    config = {"url": url, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    config |= {"repeats": repeats, "stream": load.stream, "seed": seed, "words": load.words}
    publish({"config": config, "results": results}, json_file)
    sys.exit(any(row["failed"] for row in results))


if __name__ == "__main__":
    main()
