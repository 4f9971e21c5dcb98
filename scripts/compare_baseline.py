"""The tutorial's table, measured here: first token, tokens/s and memory, plain against quantized.

    python scripts/compare_baseline.py [--concurrency 1,8] [--repeats 3] [--prompt-tokens 64]
        [--output-tokens 64] [--model models/default] [--fp32-model models/fp32]
        [--plain-model default] [--page FILE.md] [--json FILE]

Three servers of one model: the plain design (baseline_server.py: a transformers pipeline in fp32,
one request at a time), ours with the fp32 graph, ours with the quantized one. The fp32 folder is
built if it is not there (a minute). All three run, and are loaded in turns, never two at once, so
that a machine that slows down for a minute slows all. In each turn they get the same prompts and
answer in one piece, because the plain design cannot stream.

    first token  a whole answer of one token, by one client: median
    tokens/s     generated tokens / time, per number of clients: median of the turns, and ratio to
                 the plain design's of the same turn
    memory       resident, of the server and all that it started: the largest behind any turn

Prints the table, and writes it in Markdown and JSON; the last line on stdout is that JSON. The
servers write to stderr. Any failed request makes the exit status 1.
"""

import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bench
import click
from load_report import machine
from peers import memory_bytes

ROOT = Path(__file__).parents[1]
START_SECONDS = 600  # the default model may have to be downloaded and converted first


@dataclass(frozen=True)
class Server:
    url: str
    pid: int


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """Run a server on a free port until the context closes; yield it once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, *arguments, "--port", str(port)]
    server = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
    try:
        give_up_at = time.monotonic() + START_SECONDS
        while not is_ready(url):
            if server.poll() is not None or time.monotonic() > give_up_at:
                raise click.ClickException(f"{' '.join(command)} did not become ready")
            time.sleep(0.5)
        yield Server(url, server.pid)
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        server.kill()  # does nothing to a server that has ended
        server.wait()


def is_ready(url: str) -> bool:
    with suppress(OSError), closing(bench.connect(url)) as connection:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    return False  # nobody listens yet


PLAIN, FP32, QUANTIZED = "plain design, fp32", "phi-serve, fp32", "phi-serve, quantized"


@dataclass
class Measured:
    """One server; `rates` are those of its turns, by number of clients."""

    name: str
    first_token_ms: list[float] = field(default_factory=list)
    rates: dict[int, list[float]] = field(default_factory=dict)
    memory_bytes: int = 0
    num_failed: int = 0

    def hear(self, clients: int, run: Sequence[bench.Answer]) -> None:
        row = bench.summarize(clients, [run])
        self.num_failed += row["failed"]
        self.rates.setdefault(clients, []).append(row["tokens_per_second"])

    def hear_first_tokens(self, run: Sequence[bench.Answer]) -> None:
        good = [answer for answer in run if not answer.failure]
        self.num_failed += len(run) - len(good)
        self.first_token_ms += [1000 * (answer.done_at - answer.begun_at) for answer in good]

    def report(self, plain: "Measured") -> dict[str, Any]:
        return {
            "server": self.name,
            "first_token_ms": round(statistics.median(self.first_token_ms or [0]), 1),
            "tokens_per_second": {str(n): bench.spread(rates) for n, rates in self.rates.items()},
            "ratio_to_plain": {
                str(n): bench.spread(
                    [a / max(b, 0.01) for a, b in zip(rates, plain.rates[n], strict=True)]
                )
                for n, rates in self.rates.items()
            },
            "memory_bytes": self.memory_bytes,
            "failed": self.num_failed,
        }


def take_turn(
    server: Server, load: bench.Load, clients: Sequence[int], found: Measured, seed: int
) -> None:
    """One turn of one server: first tokens, then each number of clients."""
    load = replace(load, url=server.url)
    one = replace(load, output_tokens=1)
    found.hear_first_tokens(bench.measure(one, 1, 8, random.Random(seed)))
    for num in clients:
        found.hear(num, bench.measure(load, num, max(4, 2 * num), random.Random(seed)))
    found.memory_bytes = max(found.memory_bytes, memory_bytes(server.pid))


def table(rows: Sequence[Mapping[str, Any]], clients: Sequence[int]) -> list[str]:
    """In Markdown."""
    titles = [f"tokens/s, {num} client{'s' if num > 1 else ''}" for num in clients]
    lines = [
        f"| | first token, ms | {' | '.join(titles)} | memory, MB |",
        f"| --- | --- | {' | '.join('---' for _ in clients)} | --- |",
    ]
    for row in rows:
        rates = []
        for num in map(str, clients):
            rate, ratio = row["tokens_per_second"][num], row["ratio_to_plain"][num]["median"]
            times = "" if row["server"] == PLAIN else f", {ratio:.1f} times"
            between = f" ({rate['min']:.0f} to {rate['max']:.0f})"
            rates.append(f"{rate['median']:.0f}{between}{times}")
        memory = f"{row['memory_bytes'] / 1e6:.0f}"
        first = f"{row['first_token_ms']:.0f}"
        lines.append(f"| {row['server']} | {first} | {' | '.join(rates)} | {memory} |")
    return lines


def write_page(page: Path, lines: Sequence[str], config: Mapping[str, Any]) -> None:
    here = machine()
    amx = ", AMX" if here["amx"] else ""
    about = [
        "# Plain against quantized",
        "",
        f"`scripts/compare_baseline.py`, {here['date'][:10]}, {here['cpu']}{amx}, {here['cores']}"
        f" cores, which client and servers share. Prompts of {config['prompt_tokens']} tokens, all",
        f"different, {config['output_tokens']} generated tokens a request, whole answers, turns of"
        f" each server: {config['repeats']}. First token: an answer of",
        "one token, one client. tokens/s: median (min to max), and times the plain design's in the",
        "same turn. Memory: resident, the largest behind any turn.",
        "",
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([*about, *lines]) + "\n")


def build_fp32(folder: Path) -> None:
    if (folder / "quantization.json").exists():
        return
    words = ["default", "--output", str(folder), "--precision", "fp32", "--device", "cpu"]
    command = [sys.executable, "-m", "quantize", *words, "--allow-slow"]
    if subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode:
        raise click.ClickException(f"{' '.join(command)} failed")


@click.command()
@click.option("--concurrency", default="1,8", show_default=True, callback=bench.parse_concurrency)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--prompt-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--output-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--model", default="models/default", show_default=True, help="Ours, quantized.")
@click.option(
    "--fp32-model", default="models/fp32", show_default=True, help="Ours; built if it is not there."
)
@click.option("--plain-model", default="default", show_default=True, help="The plain design's.")
@click.option("--page", type=click.Path(path_type=Path), help="Write the table here, in Markdown.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
def main(page: Path | None, json_file: Path | None, **asked: Any) -> None:
    """The tutorial's table: first token, tokens/s and memory, plain against quantized."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all servers are stopped
    build_fp32(ROOT / asked["fp32_model"])
    cache = str(ROOT / "models" / ".cache")  # where `make model` keeps the download
    commands = {
        PLAIN: ("scripts/baseline_server.py", "--model", asked["plain_model"], "--cache", cache),
        FP32: ("-m", "app", "--model", asked["fp32_model"], "--host", "127.0.0.1"),
        QUANTIZED: ("-m", "app", "--model", asked["model"], "--host", "127.0.0.1"),
    }
    found = {name: Measured(name) for name in commands}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(*c)) for name, c in commands.items()}
        load = bench.Load(servers[QUANTIZED].url, 0, asked["output_tokens"], stream=False)
        load = bench.calibrate(load, asked["prompt_tokens"], random.Random(asked["repeats"]))
        for repeat in range(asked["repeats"]):
            for name, server in servers.items():
                take_turn(server, load, asked["concurrency"], found[name], repeat)
    rows = [each.report(found[PLAIN]) for each in found.values()]
    lines = table(rows, asked["concurrency"])
    click.echo("\n".join(lines))
    if page:
        write_page(page, lines, asked)
    bench.publish({"config": asked, "rows": rows}, json_file)
    sys.exit(any(row["failed"] for row in rows))


if __name__ == "__main__":
    main()
