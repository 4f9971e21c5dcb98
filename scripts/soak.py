"""Load a server with everything at once, for minutes; look for what leaks, breaks or is lost.

    python scripts/soak.py [--model models/default | --url URL [--pid PID]] [--minutes 20] \\
        [--warm-up-minutes N] [--max-slope 1.0] [--max-open 48] [--seed N] [--json FILE] [-- ARGS]

Starts `python -m app` on the model, with ARGS as its flags, or takes the server at URL. First as
many of the longest requests as there are rows: the KV cache's memory is taken page by page, and
must not pass for a leak (with 32 rows of 2,304 tokens that takes minutes on two cores: fewer rows
will do, `-- --max-batch-size 8`). Then requests arrive at random (Poisson): prompts of 1 to 2,048
tokens, answers of 1 to 256, streams and plain, on /generate and OpenAI's routes, with n, stop,
logprobs, response_format, times; one in ten is bad, one in four leaves early (close, reset,
half-close). The rate goes up while nothing waits and down while much does. Meanwhile /health/live
is asked ten times a second and /metrics every few seconds, and the process is looked at.

What must hold: each answer is whole, with the status, usage, text and finish reasons that its
request lets expect, and no 5xx but 503, and 504 where a time was set; behind the load nothing runs
or waits, and file and thread counts are back; the engine has ended each choice once, as far as
clients can know, the errors counted are those they saw, and the access log has each request once
with its status; and anonymous memory behind the warm-up grows by no more than --max-slope MiB a
minute (least squares, less two standard errors).

Prints what came of it; the last line on stdout is one JSON object with everything. Exit status 1 if
anything was unexpected.
"""

import json
import platform
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from load_report import percentiles_ms
from soak_checks import Tally, check_counters, check_log, check_process, slope
from soak_requests import Request, Served, exchange, longest, make_request
from soak_server import Sampler, Watched, learn, served_at, wait_idle

PATIENCE_SECONDS = 600.0  # more than the whole queue takes on a slow machine
MOST_WAITING = 6  # requests in the queue: then fewer are sent
FIRST_RATE, MIN_RATE, MAX_RATE = 2.0, 0.5, 50.0  # requests/s


def load(
    watched: Watched,
    served: Served,
    seconds: float,
    seed: int,
    max_open: int,
    sampler: Sampler,
    tally: Tally,
) -> None:
    """Sends requests for so long, and waits for the last answer."""
    dice, lock, places = random.Random(seed), threading.Lock(), threading.Semaphore(max_open)

    def one(request: Request) -> None:
        try:
            result = exchange(watched.address, request, PATIENCE_SECONDS)
            with lock:
                tally.add(result)
        finally:
            places.release()

    rate, ends_at, num_seen, number = FIRST_RATE, time.monotonic() + seconds, 0, 0
    with ThreadPoolExecutor(max_open) as pool:
        while time.monotonic() < ends_at:
            time.sleep(dice.expovariate(rate))
            places.acquire()
            pool.submit(one, make_request(dice, served, f"soak-{seed}-{number}"))
            number += 1
            if len(sampler.samples) > num_seen:
                num_seen = len(sampler.samples)
                say(f"{number} sent, {len(tally.results)} ended, {sampler.samples[-1]}")
                if sampler.num_waiting == 0:
                    rate *= 1.3
                elif sampler.num_waiting > MOST_WAITING:
                    rate *= 0.8
                rate = min(max(rate, MIN_RATE), MAX_RATE)


def say(line: str) -> None:
    """Progress, for people."""
    print(line, file=sys.stderr, flush=True)


def summarize(
    tally: Tally, sampler: Sampler, warm_up: float, start: dict[str, float], end: dict[str, float]
) -> dict[str, Any]:
    samples = [sample for sample in sampler.samples if sample["seconds"] >= warm_up]
    growth = {}
    for name in ("rss_mib", "anonymous_mib"):
        points = [(each["seconds"] / 60, each[name]) for each in samples if name in each]
        found, error = slope(points)
        growth[name] = {"per_minute": round(found, 3), "standard_error": round(error, 3)}
    answered = [result for result in tally.results if result.reasons]
    return {
        "requests": len(tally.results),
        "by_status": dict(sorted(Counter(str(r.status) for r in tally.results).items())),
        "by_error": dict(sorted(Counter(r.code for r in tally.results if r.code).items())),
        "by_finish_reason": dict(sorted(Counter(x for r in answered for x in r.reasons).items())),
        "left_early": dict(
            sorted(Counter(r.request.leaves for r in tally.results if r.status == "gone").items())
        ),
        "completion_tokens": sum(result.completion_tokens for result in answered),
        "health_live_ms": percentiles_ms(sampler.health),
        "most_waiting": max(sample["waiting"] for sample in sampler.samples),
        "mean_running": round(
            sum(sample["running"] for sample in samples) / max(1, len(samples)), 1
        ),
        "growth_behind_warm_up": growth,
        "start": start,
        "end": end,
        "failures": tally.failures,
        "num_failures": tally.num_failures,
        "samples": [
            {name: round(value, 1) for name, value in each.items()} for each in sampler.samples
        ],
    }


def soak(
    watched: Watched,
    seconds: float,
    warm_up: float,
    *,
    seed: int = 0,
    max_open: int = 48,
    max_slope: float = 1.0,
    max_prompt: int = 2048,
    max_answer: int = 256,
    sample_seconds: float = 5.0,
) -> dict[str, Any]:
    """The whole of it but the log; `warm_up` is seconds of the load."""
    served, num_rows = learn(watched, max_prompt, max_answer)
    before = watched.metrics()
    tally = Tally()
    with ThreadPoolExecutor(num_rows) as pool:
        first = [longest(served, f"soak-{seed}-first-{i}") for i in range(num_rows)]
        for result in pool.map(lambda r: exchange(watched.address, r, PATIENCE_SECONDS), first):
            tally.add(result)
    start = watched.look()
    say(f"{num_rows} rows filled")
    sampler = Sampler(watched, sample_seconds)
    sampler.start()
    load(watched, served, seconds, seed, max_open, sampler, tally)
    after = wait_idle(watched)
    sampler.end()
    end = watched.look()
    for failure in sampler.failures:
        tally.failed(failure)
    check_counters(tally, before, after)
    summary = summarize(tally, sampler, warm_up, start, end)
    grown = summary["growth_behind_warm_up"]["anonymous_mib"]
    early = [s["threads"] for s in sampler.samples if "threads" in s and s["seconds"] <= warm_up]
    most = max(early, default=start.get("threads", 0))
    check_process(tally, start | {"threads": most}, end, grown, max_slope)
    if watched.log is not None:
        check_log(tally, watched.log)
    return summary | {"failures": tally.failures, "num_failures": tally.num_failures}


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--model", type=click.Path(path_type=Path), default=Path("models/default"))
@click.option("--url", default=None, help="A server that runs, instead of one on --model.")
@click.option("--pid", type=int, default=None, help="Its process, to be looked at.")
@click.option("--minutes", default=20.0, show_default=True)
@click.option("--warm-up-minutes", default=None, type=float, help="By default a quarter.")
@click.option("--max-slope", default=1.0, show_default=True, help="MiB a minute.")
@click.option("--max-open", default=48, show_default=True, help="Requests at once.")
@click.option("--max-prompt", default=2048, show_default=True, help="Tokens.")
@click.option("--max-answer", default=256, show_default=True, help="Tokens.")
@click.option("--sample-seconds", default=5.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
@click.argument("args", nargs=-1)
def main(
    model: Path,
    url: str | None,
    pid: int | None,
    minutes: float,
    warm_up_minutes: float | None,
    json_path: Path | None,
    args: tuple[str, ...],
    **options: Any,
) -> None:
    warm_up = 60 * (minutes / 4 if warm_up_minutes is None else warm_up_minutes)
    with served_at(url, pid, model, args) as watched:
        summary = soak(watched, 60 * minutes, warm_up, **options)
    told = {name: value for name, value in summary.items() if name not in ("samples", "failures")}
    for name, value in told.items():
        print(f"{name}: {value}")
    for kind, example in summary["failures"].items():
        print(f"FAILED {kind}: {example}")
    result = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "minutes": minutes,
        "warm_up_minutes": warm_up / 60,
        "arguments": args,
        **options,
        **summary,
    }
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(summary["num_failures"] > 0)


if __name__ == "__main__":
    main()
