"""What switching models costs whoever is being answered, and whether the memory comes back.

    python scripts/measure_switch.py [--model models/default] [--other FOLDER] [--switches 6]
        [--streams 4] [--json FILE]

Starts a server and keeps `--streams` streams running, first in quiet, then while the server
switches between the two folders, as often as asked; without `--other` the same folder is loaded
anew. Prints how long the switches took, the longest gap between two events of a stream and the
slowest answer of /health/live in either phase, and the server's resident memory after each switch.
The last line on stdout is JSON. An answer with an error makes the exit status 1.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import bench
import click
import psutil
import requests
from compare_baseline import serving

KEY = "of-this-run"
QUIET_SECONDS = 10.0
NUM_TOKENS = 100


class Load:
    """Streams that follow each other, and a prober; `gaps` and `probes` are of the phase."""

    def __init__(self, url: str, num_streams: int) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.errors: list[str] = []
        self.gaps: list[float] = []
        self.probes: list[float] = []
        self._threads = [
            threading.Thread(target=self._run, args=(work,))
            for work in [self._stream] * num_streams + [self._probe]
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def take(self) -> dict[str, float]:
        """Milliseconds of the phase that ends, and a new phase."""
        gaps, self.gaps = sorted(self.gaps), []
        probes, self.probes = sorted(self.probes), []
        return {
            "events": len(gaps),
            "gap_p50_ms": round(gaps[len(gaps) // 2] * 1000, 1),
            "gap_max_ms": round(gaps[-1] * 1000, 1),
            "health_max_ms": round(probes[-1] * 1000, 1),
        }

    def _run(self, work: Any) -> None:
        with requests.Session() as session:
            while not self._is_over.is_set():
                try:
                    work(session)
                except (requests.RequestException, ValueError) as error:
                    self.errors.append(repr(error))

    def _stream(self, session: requests.Session) -> None:
        body = {"prompt": "Gravity is", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        url = f"{self._url}/generate"
        last_at = None
        with session.post(url, json=body | {"stream": True}, stream=True, timeout=300) as response:
            response.raise_for_status()
            for line in response.iter_lines(chunk_size=1):
                if b'"error"' in line:
                    raise ValueError(line.decode())
                now = time.perf_counter()
                if line and last_at is not None:
                    self.gaps.append(now - last_at)
                last_at = now if line else last_at

    def _probe(self, session: requests.Session) -> None:
        asked_at = time.perf_counter()
        session.get(f"{self._url}/health/live", timeout=60).raise_for_status()
        self.probes.append(time.perf_counter() - asked_at)
        time.sleep(0.01)


def switch(url: str, folder: Path) -> float:
    """Seconds; behind it the old model has ended."""
    headers = {"Authorization": f"Bearer {KEY}"}
    asked = {"path": str(folder), "force": True}
    response = requests.post(f"{url}/admin/model", json=asked, headers=headers, timeout=600)
    if response.status_code != 200:
        raise click.ClickException(response.text)
    while requests.get(f"{url}/admin/model", headers=headers, timeout=60).json()["retiring"]:
        time.sleep(0.05)
    time.sleep(0.5)  # memory is returned behind that
    return float(response.json()["seconds"])


@click.command()
@click.option("--model", type=Path, default=Path("models/default"))
@click.option("--other", type=Path)
@click.option("--switches", "num_switches", type=click.IntRange(1), default=6)
@click.option("--streams", "num_streams", type=click.IntRange(1), default=4)
@click.option("--json", "json_file", type=Path)
def main(
    model: Path, other: Path | None, num_switches: int, num_streams: int, json_file: Path | None
) -> None:
    arguments = ("-m", "app", "--host", "127.0.0.1", "--model", str(model), "--log-level", "error")
    with serving(*arguments, "--admin-api-key", KEY) as server:
        process = psutil.Process(server.pid)
        load = Load(server.url, num_streams)
        load.start()
        time.sleep(1)
        load.take()
        time.sleep(QUIET_SECONDS)
        quiet = load.take()
        rss, seconds = [process.memory_info().rss], []
        for i in range(num_switches):
            seconds.append(switch(server.url, (other or model, model)[i % 2]))
            rss.append(process.memory_info().rss)
        switching = load.take()
        load.end()
    report = {
        "benchmark": "switch",
        "models": [model.name, (other or model).name],
        "streams": num_streams,
        "seconds": seconds,
        "quiet": quiet,
        "switching": switching,
        "rss_mb": [round(size / 1e6) for size in rss],
        "errors": load.errors[:10],
    }
    for name in ("seconds", "quiet", "switching", "rss_mb", "errors"):
        print(f"{name}: {report[name]}")
    bench.publish(report, json_file)
    sys.exit(1 if load.errors else 0)


if __name__ == "__main__":
    main()
