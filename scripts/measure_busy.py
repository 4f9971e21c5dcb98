"""How busy the engine is under load, and what memory the server takes then.

    python scripts/measure_busy.py [--model models/default] [--concurrency 8,32]
        [--prompt-tokens 64] [--output-tokens 64] [--rounds 6] [--json FILE]

A server of its own is loaded by so many clients at once, `rounds` requests each, behind one to warm
up. While they run, `/metrics` and `/info` are read twice a second. `busy` is, without the first and
the last round, the median of `phi_serve_engine_busy_ratio`, `resident_mb` the most that was seen of
the process, `kv_mb` the most that cached tokens took, `bound_mb` the aim for memory: 1.2 x (the
model's folder + cached tokens + 300 MB). The last line on stdout is JSON.
"""

import random
import re
import statistics
import threading
from pathlib import Path
from typing import Any

import bench
import click
import psutil
import requests
from compare_baseline import serving

_MB = 1_000_000


class Watch:
    """Reads the server twice a second until `stop`."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self._url, self._process = url, process
        self._is_over = threading.Event()
        self.busy: list[float] = []
        self.resident: list[int] = []
        self.kv: list[int] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.5):
            text = requests.get(f"{self._url}/metrics", timeout=60).text
            info = requests.get(f"{self._url}/info", timeout=60).json()
            found = re.search(r"^phi_serve_engine_busy_ratio (\S+)", text, re.MULTILINE)
            assert found is not None
            self.busy.append(float(found[1]))
            self.resident.append(self._process.memory_info().rss)
            self.kv.append(info["kv_cache_tokens"] * info["kv_bytes_per_token"])


def measure(model: Path, clients: int, asked: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(clients)
    options = ("--max-batch-size", str(clients), "--log-level", "error", "--host", "127.0.0.1")
    with serving("-m", "app", "--model", str(model), *options) as server:
        load = bench.Load(server.url, 0, asked["output_tokens"], stream=True)
        load = bench.calibrate(load, asked["prompt_tokens"], rng)
        watch = Watch(server.url, psutil.Process(server.pid))
        try:
            run = bench.measure(load, clients, clients * asked["rounds"], rng)
        finally:
            watch.stop()
    edge = len(watch.busy) // asked["rounds"]
    weights = sum(file.stat().st_size for file in model.iterdir())
    kv = max(watch.kv)
    return {
        "clients": clients,
        "failed": sum(bool(answer.failure) for answer in run),
        "busy": round(statistics.median(watch.busy[edge:-edge]), 3),
        "resident_mb": round(max(watch.resident) / _MB),
        "kv_mb": round(kv / _MB),
        "weights_mb": round(weights / _MB),
        "bound_mb": round(1.2 * (weights + kv + 300 * _MB) / _MB),
    }


@click.command()
@click.option("--model", type=Path, default=Path("models/default"))
@click.option("--concurrency", default="8,32", help="Clients, separated by commas.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=64)
@click.option("--output-tokens", type=click.IntRange(1), default=64)
@click.option("--rounds", type=click.IntRange(3), default=6, help="Requests of each client.")
@click.option("--json", "json_file", type=Path)
def main(model: Path, concurrency: str, json_file: Path | None, **asked: Any) -> None:
    results = [measure(model, int(clients), asked) for clients in concurrency.split(",")]
    for result in results:
        click.echo(str(result))
    report = {"benchmark": "busy", "model": model.name, **asked, "results": results}
    bench.publish(report, json_file)


if __name__ == "__main__":
    main()
