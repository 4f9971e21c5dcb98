"""Compare this server with the plain design (baseline_server.py), on this machine, in one run.

    python scripts/compare_baseline.py [--concurrency 8] [--repeats 3] [--prompt-tokens 64]
        [--output-tokens 64] [--model models/default] [--plain-model default] [--json FILE]

Starts both servers and loads them in turn, ours, plain, ours, plain, never both at once, so that a
machine that slows down for a minute slows both. In each turn both get the same prompts, and both
answer in one piece, because the plain design cannot stream; bench.py tells what is measured. Prints
the median tokens/s and the ratio; the last line on stdout is JSON, the servers write to stderr.
Any failed request makes the exit status 1.
"""

import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import bench
import click

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


@click.command()
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(1))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--prompt-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--output-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--model", default="models/default", show_default=True, help="For our server.")
@click.option("--plain-model", default="default", show_default=True, help="For the plain one.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
def main(
    concurrency: int,
    repeats: int,
    prompt_tokens: int,
    output_tokens: int,
    model: str,
    plain_model: str,
    json_file: Path | None,
) -> None:
    """Compare this server with the plain design, on this machine, in one run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that both servers are stopped
    ours = serving("-m", "app", "--model", model, "--host", "127.0.0.1")
    cache = str(ROOT / "models" / ".cache")  # where `make model` keeps the download
    plain = serving("scripts/baseline_server.py", "--model", plain_model, "--cache", cache)
    requests = max(8, 3 * concurrency)
    runs: dict[str, list[list[bench.Answer]]] = {"ours": [], "plain": []}
    with ours as our_server, plain as plain_server:
        load = bench.Load(our_server.url, 0, output_tokens, stream=False)
        load = bench.calibrate(load, prompt_tokens, random.Random(repeats))
        loads = {"ours": load, "plain": replace(load, url=plain_server.url)}
        for repeat in range(repeats):
            for name, load in loads.items():
                runs[name].append(bench.measure(load, concurrency, requests, random.Random(repeat)))

    rows = {name: bench.summarize(concurrency, turns) for name, turns in runs.items()}
    ratio = rows["ours"]["tokens_per_second"] / max(rows["plain"]["tokens_per_second"], 0.01)
    click.echo(f"      {bench.TABLE.format(*bench.TITLES)}")
    for name, row in rows.items():
        click.echo(f"{name:6}{bench.table_row(row)}")
    click.echo(f"ours / plain: {ratio:.2f}")
    bench.publish({**rows, "ratio": round(ratio, 3)}, json_file)
    sys.exit(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    main()
