"""From the answers of a load to the numbers of a row, the table's line and the JSON.

Failed requests are counted, by kind, and are in no number. Latencies are pooled over the repeats;
`spread` has each repeat's own. Percentiles are by nearest rank, so p99 of fewer than 100 values is
their maximum.
"""

import json
import math
import os
import platform
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import datetime
from http.client import HTTPConnection, HTTPException
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from load_client import TIMEOUT_SECONDS, Answer, Run

PERCENTS = (50, 95, 99)
TABLE = "{:>11} {:>8} {:>6} {:>6} {:>24} {:>8} {:>22} {:>20} {:>28} {:>6}"
TITLES = ("concurrency", "requests", "prompt", "output", "tokens/s", "in/s")
TITLES += ("TTFT p50/p95/p99", "ITL", "e2e ms", "client")
# What servers say of themselves: ours, vLLM's, llama.cpp's.
FACTS = {"/info": ("model", "version", "versions", "precision"), "/version": ("version",)}
FACTS["/props"] = ("build_info",)


def percentile(values: Sequence[float], percent: float) -> float:
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {f"p{p}": round(1000 * percentile(seconds, p), 3) for p in PERCENTS}


def tokens_per_second(answers: Sequence[Answer], prompts: bool = False) -> float:
    """Generated tokens, or those of the prompts, over the time from first send to last byte."""
    wall_seconds = max(a.done_at for a in answers) - min(a.begun_at for a in answers)
    good = [a for a in answers if not a.failure]
    return sum(a.prompt_tokens if prompts else a.completion_tokens for a in good) / wall_seconds


def first_token_seconds(answers: Sequence[Answer]) -> list[float]:
    return [a.text_at[0] - a.begun_at for a in answers if a.text_at]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Of one number in each repeat."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return {"median": round(middle, 2), "min": round(least, 2), "max": round(most, 2)}


def spread_of(runs: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """The rates and median latencies of the repeats."""
    latencies: dict[str, Callable[[Answer], float | None]] = {
        "ttft_p50_ms": lambda a: a.text_at[0] - a.begun_at if a.text_at else None,
        "e2e_p50_ms": lambda a: a.done_at - a.begun_at,
    }
    found = {
        "tokens_per_second": spread([tokens_per_second(run) for run in runs]),
        "prompt_tokens_per_second": spread([tokens_per_second(run, True) for run in runs]),
    }
    for name, latency in latencies.items():
        taken = [[latency(a) for a in run if not a.failure] for run in runs]
        known = [[value for value in values if value is not None] for values in taken]
        if all(known):
            found[name] = spread([1000 * percentile(values, 50) for values in known])
    return found


def by_turn(good: Sequence[Answer]) -> list[dict[str, Any]]:
    """TTFT of each turn of the conversations; e2e where nothing is streamed."""
    rows = []
    for turn in sorted({a.turn for a in good}):
        these = [a for a in good if a.turn == turn]
        rows.append(
            {
                "turn": turn,
                "requests": len(these),
                "mean_prompt_tokens": mean([a.prompt_tokens for a in these]),
                "ttft_ms": percentiles_ms(first_token_seconds(these)),
                "e2e_ms": percentiles_ms([a.done_at - a.begun_at for a in these]),
            }
        )
    return rows


def mean(values: Sequence[float]) -> float:
    return round(sum(values) / max(1, len(values)), 1)


def summarize(
    concurrency: int | None, runs: Sequence[Sequence[Answer]], rate: float | None = None
) -> dict[str, Any]:
    """Reduce the repeats of one load to the numbers of one row. `rate`: requests/s, open loop."""
    answers = list(chain.from_iterable(runs))
    failed = [a for a in answers if a.failure]
    good = [a for a in answers if not a.failure]
    rates = [round(tokens_per_second(run), 2) for run in runs]
    gaps = [later - earlier for a in good for earlier, later in pairwise(a.text_at)]
    late = [a.sent_at - a.planned_at for a in answers if a.planned_at is not None]
    checked = [a for a in good if a.wanted_prompt_tokens]
    shares = [run.cpu_share for run in runs if isinstance(run, Run)]
    row = {
        "concurrency": concurrency,
        "rate": rate,
        "requests": len(answers),
        "failed": len(failed),
        "failures": dict(Counter(a.failure for a in failed).most_common()),
        "errors": dict(Counter(a.kind for a in failed).most_common()),
        "refused_429": sum(a.num_429 for a in answers),
        "mean_prompt_tokens": mean([a.prompt_tokens for a in good]),
        "prompts_off_length": sum(a.prompt_tokens != a.wanted_prompt_tokens for a in checked),
        "mean_completion_tokens": mean([a.completion_tokens for a in good]),
        "completion_tokens": sum(a.completion_tokens for a in good),
        "tokens_per_second": round(statistics.median(rates), 2),
        "tokens_per_second_runs": rates,
        "spread": spread_of(runs),
        "ttft_ms": percentiles_ms(first_token_seconds(good)),
        "itl_ms": percentiles_ms(gaps),
        "e2e_ms": percentiles_ms([a.done_at - a.begun_at for a in good]),
        "sent_late_ms": percentiles_ms(late),
        "client_cpu_share": round(statistics.median(shares), 3) if shares else None,
    }
    if any(a.turn > 1 for a in answers):
        row["turns"] = by_turn(good)
    return row


def table_row(row: dict[str, Any]) -> str:
    """The row's line, and one for each thing that a reader must not miss."""
    rates, share = row["tokens_per_second_runs"], row["client_cpu_share"]
    between = f" ({min(rates):.1f}..{max(rates):.1f})" if len(rates) > 1 else ""
    load = f"{row['rate']:g}/s" if row["rate"] else row["concurrency"]
    line = TABLE.format(
        *(load, row["requests"], row["mean_prompt_tokens"], row["mean_completion_tokens"]),
        f"{row['tokens_per_second']:.1f}{between}",
        f"{row['spread']['prompt_tokens_per_second']['median']:.1f}",
        *(_times(row[name]) for name in ("ttft_ms", "itl_ms", "e2e_ms")),
        "-" if share is None else f"{100 * share:.0f} %",
    )
    notes = [f"{'FAILED':>11} {n} x {failure}" for failure, n in row["failures"].items()]
    if row["refused_429"]:
        notes.append(f"{'429':>11} {row['refused_429']} refusals")
    if row["prompts_off_length"]:
        notes.append(f"{'LENGTH':>11} {row['prompts_off_length']} prompts are not as long as asked")
    for turn in row.get("turns", ()):
        told = f"TTFT {_times(turn['ttft_ms'])}, e2e {_times(turn['e2e_ms'])}"
        prompt = f"prompt {turn['mean_prompt_tokens']}"
        notes.append(f"{'turn':>11} {turn['turn']}: {prompt}, {told} ms")
    return "\n".join([line, *notes])


def _times(milliseconds: dict[str, float] | None) -> str:
    return "/".join(f"{ms:.1f}" for ms in milliseconds.values()) if milliseconds else "-"


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search("model name.*: (.*)", text)
    cpu = model[1] if model else platform.processor() or platform.machine()
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    system = f"{platform.system()} {platform.release()}"
    facts = {"cpu": cpu, "amx": "amx_int8" in text, "cores": os.cpu_count(), "date": date}
    return facts | {"python": platform.python_version(), "system": system}


def server_facts(url: str) -> dict[str, Any]:
    """What the server says of its version and model; what it does not is left out."""
    facts: dict[str, Any] = {}
    for path, names in FACTS.items():
        said = get_json(url, path)
        facts |= {name: said[name] for name in names if name in said}
    models = get_json(url, "/v1/models").get("data") or [{}]
    if "id" in models[0]:
        facts["model_id"] = models[0]["id"]
    return facts


def connect(url: str, timeout: float = TIMEOUT_SECONDS) -> HTTPConnection:
    """Prepare a connection, opened by its first request (http.client sets TCP_NODELAY)."""
    return HTTPConnection(urlsplit(url).netloc, timeout=timeout)


def get_json(url: str, path: str) -> dict[str, Any]:
    """An object that the server has there; empty if it has none."""
    with (
        suppress(OSError, HTTPException, ValueError),
        closing(connect(url, timeout=10)) as connection,
    ):
        connection.request("GET", urlsplit(url).path.rstrip("/") + path)
        response = connection.getresponse()
        said = json.load(response)
        return said if response.status == 200 and isinstance(said, dict) else {}
    return {}


def publish(report: dict[str, Any], json_file: Path | None) -> None:
    """Print the report as one line of JSON, with where and when the numbers were taken."""
    line = json.dumps(report | {"client": machine()})
    if json_file:
        json_file.write_text(line + "\n")
    click.echo(line)
