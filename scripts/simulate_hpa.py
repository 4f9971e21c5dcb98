"""A step load against the autoscaler of deploy/k8s: does it flap, and how long does it take?

    python scripts/simulate_hpa.py [--seeds 10] [--load-seconds 20,45,180] [--json FILE]
        [--plot FILE]

Servers are a queueing model (hpa_cluster.py), the HorizontalPodAutoscaler its controller's formula
(hpa_formula.py). Target, bounds and policies are read from deploy/k8s, and so are the interval of
the scrapes, the drain and the series that the autoscaler goes by; two others are run beside it,
under the same target and policies, and so is KEDA's ScaledObject. For five minutes 1 request a
second comes, for half an hour 8, then 1 again; `--load-seconds` is how long a server loads its
model. All times are simulated seconds from the step on; a column has the median of the seeds, and
the most in brackets. The last line on stdout is JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml
from hpa_cluster import TICK_SECONDS, Cluster, Pod, Server
from hpa_formula import Autoscaler
from load_report import machine

K8S = Path(__file__).parents[1] / "deploy" / "k8s"
SYNC_SECONDS = 15  # of the controller
LOW, HIGH = 1.0, 8.0  # requests per second
STEP_AT, DROP_AT, END_AT = 300, 2100, 3600
KEDA = "KEDA"
SIGNALS: dict[str, Callable[[Pod], float]] = {
    "phi_serve_load_factor": Pod.load_factor,
    "phi_serve_saturation_ratio": lambda pod: min(1.0, pod.load_factor()),
    "phi_serve_engine_busy_ratio": Pod.busy_ratio,
}


@dataclass(frozen=True)
class Setup:
    """What deploy/k8s says."""

    autoscaler: dict[str, Any]  # the manifest
    scaled_object: dict[str, Any]  # that for KEDA
    signal: str  # the series
    scrape_seconds: int
    drain_seconds: int

    @classmethod
    def of(cls, folder: Path = K8S) -> Setup:
        def read(path: str) -> Any:
            return yaml.safe_load((folder / path).read_text())

        autoscaler = read("components/hpa/horizontalpodautoscaler.yaml")
        [metric] = autoscaler["spec"]["metrics"]
        [rule] = read("monitoring/prometheus-adapter.yaml")["rules"]["custom"]
        assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
        [job] = read("monitoring/prometheus.yaml")["scrape_configs"]
        pod = read("base/deployment.yaml")["spec"]["template"]["spec"]
        env = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
        scrape_seconds = int(job["scrape_interval"].removesuffix("s"))
        signal = rule["seriesQuery"].partition("{")[0]
        scaled = read("components/keda/scaledobject.yaml")
        return cls(autoscaler, scaled, signal, scrape_seconds, int(env["DRAIN_SECONDS"]))

    def scaler(self, is_keda: bool = False) -> Autoscaler:
        return Autoscaler.of_keda(self.scaled_object) if is_keda else Autoscaler.of(self.autoscaler)


class Scrapes:
    """Prometheus: what each pod said at its last scrape, if it was ready then."""

    def __init__(self, seconds: int, signal: Callable[[Pod], float], rng: np.random.Generator):
        self._seconds, self._signal, self._rng = seconds, signal, rng
        self._next_at: dict[Pod, float] = {}
        self._values: dict[Pod, float | None] = {}

    def tick(self, now: float, pods: list[Pod]) -> None:
        for pod in pods:
            if pod not in self._next_at:
                self._next_at[pod] = now + self._rng.uniform(0, self._seconds)
            if now >= self._next_at[pod]:
                self._values[pod] = self._signal(pod) if pod.is_ready(now) else None
                self._next_at[pod] += self._seconds

    def of(self, pods: list[Pod]) -> list[float | None]:
        return [self._values.get(pod) for pod in pods]


@dataclass
class Run:
    """What was seen, at each tick."""

    replicas: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)  # pods that requests go to
    waits: list[tuple[float, float]] = field(default_factory=list)  # began at, seconds
    num_cut_off: int = 0


def offered(now: float) -> float:
    return HIGH if STEP_AT <= now < DROP_AT else LOW


def simulate(setup: Setup, server: Server, name: str, seed: int) -> Run:
    """`name` is a signal, or KEDA for the ScaledObject."""
    rng = np.random.default_rng(seed)
    autoscaler, signal = setup.scaler(name == KEDA), setup.signal if name == KEDA else name
    server = replace(server, drain_seconds=setup.drain_seconds)
    cluster = Cluster(server, autoscaler.min_replicas, rng)
    scrapes = Scrapes(setup.scrape_seconds, SIGNALS[signal], np.random.default_rng(seed))
    run = Run()
    for number in range(round(END_AT / TICK_SECONDS)):
        now = number * TICK_SECONDS
        run.waits += [(now, wait) for wait in cluster.tick(now, offered(now))]
        pods = cluster.wanted
        started = [pod for pod in pods if pod.is_started(now)]
        scrapes.tick(now, started)
        if now % SYNC_SECONDS == 0:
            values, starting = scrapes.of(started), len(pods) - len(started)
            cluster.scale(now, autoscaler.decide(now, len(pods), values, starting))
        run.replicas.append(len(cluster.wanted))
        run.asked.append(cluster.num_asked_now(now))
    run.num_cut_off = cluster.num_cut_off
    return run


def turns(numbers: list[int]) -> int:
    """How often the number of pods, having grown, shrinks next, or the other way round."""
    changes = [b - a for a, b in zip(numbers, numbers[1:], strict=False) if a != b]
    return sum((a > 0) != (b > 0) for a, b in zip(changes, changes[1:], strict=False))


def seconds_until(numbers: list[int], start: float, is_so: Callable[[int], bool]) -> float:
    """From `start` until it is so; endless if it never is."""
    for number in range(round(start / TICK_SECONDS), len(numbers)):
        if is_so(numbers[number]):
            return number * TICK_SECONDS - start
    return float("inf")


def calm_after(waits: list[tuple[float, float]], target: float) -> float:
    """Seconds from the step until, for the first time, of a minute's requests 95 % have waited for
    `target` or less."""
    for start in range(STEP_AT, DROP_AT, 60):
        minute = sorted(wait for at, wait in waits if start <= at < start + 60)
        if start > STEP_AT and minute[int(0.95 * len(minute))] <= target:
            return float(start - STEP_AT)
    return float("inf")


def measure(run: Run, setup: Setup, server: Server) -> dict[str, float]:
    autoscaler = setup.scaler()
    needed = server.num_needed(HIGH, autoscaler.target)
    low = run.replicas[round(STEP_AT / TICK_SECONDS) - 1]
    return {
        "pods_at_low_load": low,
        "turns": turns(run.replicas),
        "first_seconds": seconds_until(run.replicas, STEP_AT, lambda num: num > low),
        "enough_seconds": seconds_until(run.asked, STEP_AT, lambda num: num >= needed),
        "calm_seconds": calm_after(run.waits, server.wait_target_seconds),
        "longest_wait_seconds": max(wait for _, wait in run.waits),
        "most_pods": max(run.replicas),
        "pods_at_high_load": run.replicas[round(DROP_AT / TICK_SECONDS) - 1],
        "back_seconds": seconds_until(
            run.replicas, DROP_AT, lambda num: num <= autoscaler.min_replicas
        ),
        "pod_hours": round(sum(run.replicas) * TICK_SECONDS / 3600, 2),
        "cut_off": run.num_cut_off,
    }


def cell(values: list[float]) -> str:
    def shown(value: float) -> str:
        return "never" if value == float("inf") else f"{value:.0f}"

    middle, most = shown(statistics.median_low(values)), shown(max(values))
    return middle if middle == most else f"{middle} ({most})"


def table(rows: list[dict[str, Any]]) -> str:
    columns = {
        "pods_at_low_load": "pods at 1/s",
        "first_seconds": "first new pod asked for, s",
        "enough_seconds": "enough ready, s",
        "calm_seconds": "waits p95 below 5 s again, s",
        "longest_wait_seconds": "longest wait, s",
        "most_pods": "most pods",
        "pods_at_high_load": "pods at 8/s, later",
        "back_seconds": "back to the fewest, s",
        "turns": "changes of direction",
    }
    lines = [["signal", "load, s", *columns.values()], ["---"] * (len(columns) + 2)]
    for row in rows:
        seen = [cell([run[name] for run in row["runs"]]) for name in columns]
        lines.append([f"`{row['signal']}`", str(row["load_seconds"]), *seen])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@click.command(help=__doc__)
@click.option("--seeds", default=10)
@click.option("--load-seconds", default="20,45,180")
@click.option("--json", "json_file", type=Path)
@click.option("--plot", "plot_file", type=Path)
def main(seeds: int, load_seconds: str, json_file: Path | None, plot_file: Path | None) -> None:
    setup = Setup.of()
    rows, drawn = [], {}
    for seconds in map(int, load_seconds.split(",")):
        server = replace(Server(), load_seconds=seconds)
        for signal in (*SIGNALS, KEDA):
            runs = [simulate(setup, server, signal, seed) for seed in range(seeds)]
            if signal in SIGNALS:  # KEDA's line would hide another
                drawn.setdefault(signal, runs[0])
            found = [measure(run, setup, server) for run in runs]
            rows.append({"signal": signal, "load_seconds": seconds, "runs": found})
    print(table(rows))
    if plot_file is not None:
        from hpa_plot import draw

        draw(plot_file, drawn, offered)
    line = json.dumps({"signal": setup.signal, "rows": rows, "machine": machine()})
    line = line.replace("Infinity", "null")
    if json_file is not None:
        json_file.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
