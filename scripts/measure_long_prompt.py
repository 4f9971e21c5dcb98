"""What a long prompt costs the streams that are open when it arrives, and what it pays for that.

    python scripts/measure_long_prompt.py [--model models/default] [--stalls 1] [--repeats 3]
        [--streams 8] [--stream-tokens 64] [--prompt-tokens 4000] [--quiet-seconds 5] [--json FILE]

For each PREFILL_STALL a server is started. In each repeat so many new streams decode, first in
quiet, then while one long prompt is read, then in quiet again; at last the prompt is read with
nothing else open. Compared are the gaps between two events of a stream (ITL) that end in quiet, and
those that end between the long prompt's sending and its first token: `ratio_p95` is the 95th
percentile of the disturbed gaps over the mean of the two quiet medians, for a stream's own step
grows with its text; `ratio_p50` is their medians', `ratio_p95_to_before` has the first quiet alone
below it. `ttft_ms` is the long prompt's, `ttft_alone_ms` without open streams. The last line on
stdout is JSON. An answer with an error makes the exit status 1.
"""

import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import bench
import click
import requests
from compare_baseline import serving

SETTLE_EVENTS = 10  # of each stream, before the quiet begins
STEADY = 1 << 16  # tokens: more than a stream says before it is left


class Streams:
    """Open until `close`; `gaps` has the instant at which each ended, and its seconds."""

    def __init__(self, url: str, prompts: list[str], num_tokens: int) -> None:
        self._is_over = threading.Event()
        self.gaps: list[tuple[float, float]] = []
        self.num_events = [0] * len(prompts)
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(url, i, prompt, num_tokens))
            for i, prompt in enumerate(prompts)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Until all of them decode."""
        while min(self.num_events) < SETTLE_EVENTS and not self.errors:
            time.sleep(0.01)

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def between(self, begun_at: float, ended_at: float) -> list[float]:
        return [gap for at, gap in self.gaps if begun_at < at <= ended_at]

    def _run(self, url: str, index: int, prompt: str, num_tokens: int) -> None:
        last_at = None
        try:
            for _ in events(url, prompt, num_tokens):
                now = time.perf_counter()
                if last_at is not None:
                    self.gaps.append((now, now - last_at))
                last_at = now
                self.num_events[index] += 1
                if self._is_over.is_set():
                    return
            self.errors.append("a stream has ended before it was left")
        except (requests.RequestException, ValueError) as error:
            self.errors.append(repr(error))


def events(url: str, prompt: str, num_tokens: int) -> Any:
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=600) as response:
        if response.status_code != 200:
            raise ValueError(response.text)
        for line in response.iter_lines(chunk_size=1):
            if b'"error"' in line:
                raise ValueError(line.decode())
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def read_long(url: str, prompt: str) -> tuple[float, float]:
    """When it was sent, and when its first token came."""
    sent_at = time.perf_counter()
    first, *_ = events(url, prompt, 1)
    return sent_at, time.perf_counter()


def disturb(
    url: str, prompts: list[str], long: str, max_tokens: int, quiet_seconds: float
) -> tuple[dict[str, Any], list[str]]:
    """One repeat, and what went wrong in it."""
    streams = Streams(url, prompts, max_tokens)
    streams.wait()
    begun_at = time.perf_counter()
    time.sleep(quiet_seconds)
    try:
        sent_at, first_at = read_long(url, long)
        time.sleep(quiet_seconds)
        ended_at = time.perf_counter()
    finally:
        streams.close()
    other = " ".join(reversed(long.split()))  # not what the cache has already
    alone_at, alone_first_at = read_long(url, other)
    before, after = streams.between(begun_at, sent_at), streams.between(first_at, ended_at)
    disturbed = streams.between(sent_at, first_at)
    plain = (statistics.median(before) + statistics.median(after)) / 2
    p95 = bench.percentile(disturbed, 95)
    row = {
        "before_ms": summary(before),
        "after_ms": summary(after),
        "disturbed_ms": summary(disturbed),
        "ratio_p50": round(statistics.median(disturbed) / plain, 2),
        "ratio_p95": round(p95 / plain, 2),
        "ratio_p95_to_before": round(p95 / statistics.median(before), 2),
        "ttft_ms": round(1000 * (first_at - sent_at)),
        "ttft_alone_ms": round(1000 * (alone_first_at - alone_at)),
    }
    return row, streams.errors


def summary(gaps: list[float]) -> dict[str, float]:
    percents = {f"p{p}": round(1000 * bench.percentile(gaps, p), 1) for p in (50, 95, 99)}
    return {"events": len(gaps), **percents, "max": round(1000 * max(gaps), 1)}


def measure_stall(model: Path, stall: float, asked: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(0)
    arguments = ("--model", str(model), "--host", "127.0.0.1", "--log-level", "error")
    with serving("-m", "app", *arguments, "--prefill-stall", str(stall)) as server:
        load = bench.Load(server.url, 0, 1, stream=False)
        short = bench.calibrate(load, asked["stream_tokens"], rng).words
        long = bench.calibrate(load, asked["prompt_tokens"], rng).words
        info = requests.get(f"{server.url}/info", timeout=60).json()
        # None comes to its end.
        max_tokens = min(STEADY, info["max_model_len"] - 2 * asked["stream_tokens"])
        rows: list[dict[str, Any]] = []
        errors: list[str] = []
        for _ in range(asked["repeats"]):
            prompts = bench.make_prompts(rng, short, asked["streams"])
            [prompt] = bench.make_prompts(rng, long, 1)
            quiet_seconds = asked["quiet_seconds"]
            row, failed = disturb(server.url, prompts, prompt, max_tokens, quiet_seconds)
            rows.append(row)
            errors += failed
            click.echo(f"stall {stall:g}: {row}")
    names = ("ratio_p50", "ratio_p95", "ratio_p95_to_before", "ttft_ms", "ttft_alone_ms")
    medians = {name: statistics.median(row[name] for row in rows) for name in names}
    report = {"prefill_stall": stall, "prefill_chunk": info["prefill_chunk"], **medians}
    return report | {"repeats": rows, "errors": errors[:10]}


@click.command()
@click.option("--model", type=Path, default=Path("models/default"))
@click.option("--stalls", default="1", help="Of PREFILL_STALL, separated by commas.")
@click.option("--repeats", type=click.IntRange(1), default=3)
@click.option("--streams", type=click.IntRange(1), default=8)
@click.option("--stream-tokens", type=click.IntRange(1), default=64, help="Of their prompts.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=4000, help="Of the long prompt.")
@click.option("--quiet-seconds", type=float, default=5.0)
@click.option("--json", "json_file", type=Path)
def main(model: Path, stalls: str, json_file: Path | None, **asked: Any) -> None:
    results = [measure_stall(model, float(stall), asked) for stall in stalls.split(",")]
    report = {"benchmark": "long prompt", "model": model.name, **asked, "results": results}
    bench.publish(report, json_file)
    sys.exit(any(result["errors"] for result in results))


if __name__ == "__main__":
    main()
