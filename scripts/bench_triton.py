"""Our server, the same engine under Triton, and the tutorial's ensemble, under the same load.

    python scripts/bench_triton.py --ours http://127.0.0.1:8080 --triton http://127.0.0.1:8000

Both servers run, on one machine and with one model folder (docs/triton.md says how); a server that
is not named is left out. Each is asked the same prompts by the same client, over HTTP: the first
two stream, the ensemble is asked for token after token. Prompts have from half to one and a half
times --prompt-tokens words of about a token; with --same-length all have as many, the best case of
Triton's dynamic batching. The last line is JSON.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from bench import parse_concurrency
from dialects import Target
from load_client import Answer, LoadClient, Request, RequestFailed, Run, User
from load_report import publish, summarize
from workload import make_prompts

TABLE = "{:<32}{:>8}{:>10}{:>22}"
TITLES = ("server", "clients", "tokens/s", "TTFT p50/p95/p99 ms")

# A prompt to all that is asked for it; the answers go into the run.
Ask = Callable[[str, Run], User]


def ask_ours(url: str, num_tokens: int) -> Ask:
    target = Target(url)

    def ask(prompt: str, run: Run) -> User:
        run.append((yield target.request([prompt], num_tokens)))

    return ask


def ask_engine(url: str, num_tokens: int) -> Ask:
    """The stream of `phi3_mini`."""
    rest = {"stream": True, "max_tokens": num_tokens, "temperature": 0}
    rest["sampling_parameters"] = json.dumps({"ignore_eos": True})

    def check(answer: Answer) -> None:
        if answer.completion_tokens != num_tokens:
            raise RequestFailed("short_answer", f"{answer.completion_tokens} tokens")

    def ask(prompt: str, run: Run) -> User:
        payload = _post(url, "phi3_mini/generate_stream", {"text_input": prompt} | rest)
        run.append((yield Request(payload, _read_engine, check)))

    return ask


def _read_engine(event: dict[str, Any], answer: Answer) -> None:
    _refuse_error(event)
    answer.text += event["text_output"]
    if "finish_reason" in event:
        answer.finish_reason = event["finish_reason"]
        answer.prompt_tokens = event["prompt_tokens"]
        answer.completion_tokens = event["completion_tokens"]


def ask_ensemble(url: str, num_tokens: int) -> Ask:
    """A request for each token; what it gives goes back in with the next."""

    def ask(prompt: str, run: Run) -> User:
        body: dict[str, Any] = {"text_input": prompt}
        whole: Answer | None = None
        for _ in range(num_tokens):
            given: dict[str, Any] = {}
            payload = _post(url, "phi3_mini_ensemble/generate", body)
            answer = yield Request(payload, _keeper(given), lambda _: None)
            whole = whole or answer
            whole.done_at, whole.failure, whole.kind = answer.done_at, answer.failure, answer.kind
            if answer.failure:
                break
            whole.text_at.append(answer.done_at)
            whole.completion_tokens += 1
            ids = given["output_ids"]
            body["answer_ids"] = ids if isinstance(ids, list) else [ids]
        assert whole is not None
        run.append(whole)

    return ask


def _keeper(given: dict[str, Any]) -> Callable[[dict[str, Any], Answer], None]:
    def keep(event: dict[str, Any], _: Answer) -> None:
        _refuse_error(event)
        given.update(event)

    return keep


def _refuse_error(event: dict[str, Any]) -> None:
    if (error := event.get("error")) is not None:
        raise RequestFailed("error_event", f"error event: {error}")


def _post(url: str, path: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    head = (
        f"POST /v2/models/{path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


KINDS: dict[str, tuple[str, Callable[[str, int], Ask]]] = {
    "ours": ("our server", ask_ours),
    "engine": ("our engine under Triton", ask_engine),
    "ensemble": ("the tutorial's ensemble", ask_ensemble),
}


def run_closed(url: str, ask: Ask, clients: int, prompts: Sequence[str]) -> Run:
    """`clients`, each with its next prompt when its last is answered."""
    run, left = Run(), iter(prompts)

    def work(left: Iterator[str]) -> User:
        for prompt in left:
            yield from ask(prompt, run)

    with LoadClient(url) as client:
        run.cpu_share = client.run([(None, work(left)) for _ in range(clients)])
    return run


def prompts_for(rng: random.Random, num_words: int, count: int, same_length: bool) -> list[str]:
    half = 0 if same_length else num_words // 2
    lengths = [num_words + rng.randint(-half, half) for _ in range(count)]
    return [make_prompts(rng, length, 1)[0] for length in lengths]


def measure(name: str, url: str, ask: Ask, clients: int, prompts: Sequence[str]) -> dict[str, Any]:
    """A row, printed. The first prompt warms the server up."""
    run_closed(url, ask, 1, prompts[:1])
    run = run_closed(url, ask, clients, prompts[1:])
    row = summarize(clients, [run])
    first = row["ttft_ms"]
    shown = "/".join(f"{each:.0f}" for each in first.values()) if first else "-"
    rate = f"{row['tokens_per_second']:.1f}"
    click.echo(TABLE.format(name, clients, rate, shown))
    for failure, number in row["failures"].items():
        click.echo(f"  FAILED {number} x {failure}")
    return {"server": name} | row


@click.command(help=__doc__)
@click.option("--ours", help="Address of our server.")
@click.option("--triton", help="Address of Triton's HTTP socket.")
@click.option("--concurrency", default="1,8,32", show_default=True, callback=parse_concurrency)
@click.option("--prompt-tokens", default=64, show_default=True, type=click.IntRange(2))
@click.option("--output-tokens", default=32, show_default=True, type=click.IntRange(1))
@click.option(
    "--requests", type=click.IntRange(1), help="A row; by default one a client, 4 or more"
)
@click.option("--same-length", is_flag=True, help="All prompts have as many words.")
@click.option("--only", multiple=True, type=click.Choice(list(KINDS)), help="Of these; once each.")
@click.option("--seed", type=int, help="Of the prompts; new each time, so no cache knows them.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
def main(json_file: Path | None, **asked: Any) -> None:
    seed = asked["seed"] = time.time_ns() % 2**32 if asked["seed"] is None else asked["seed"]
    urls = {"ours": asked["ours"], "engine": asked["triton"], "ensemble": asked["triton"]}
    servers = [
        (name, url, ask(url, asked["output_tokens"]))
        for kind, (name, ask) in KINDS.items()
        if (url := urls[kind]) and kind in (asked["only"] or KINDS)
    ]
    if not servers:
        raise click.UsageError("name a server: --ours or --triton")
    click.echo(TABLE.format(*TITLES))
    rows = []
    for clients in asked["concurrency"]:
        count = 1 + (asked["requests"] or max(4, clients))
        for name, url, ask in servers:
            # The same for each, whoever comes first.
            rng = random.Random(seed + clients)
            prompts = prompts_for(rng, asked["prompt_tokens"], count, asked["same_length"])
            rows.append(measure(name, url, ask, clients, prompts))
    publish({"config": asked, "results": rows}, json_file)
    if any(row["failed"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
