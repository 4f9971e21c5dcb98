"""The picture of simulate_hpa.py: the load, the pods that each signal asks for, and the waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from hpa_cluster import TICK_SECONDS

if TYPE_CHECKING:
    from simulate_hpa import Run


def draw(file: Path, runs: dict[str, Run], offered: Callable[[float], float]) -> None:
    """`runs` by signal; `offered` gives requests per second at a second. Writes `file`, a PNG."""
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(9, 7.5), height_ratios=[1, 2, 2])
    load, pods, waits = axes
    num_ticks = max(len(run.replicas) for run in runs.values())
    minutes = [number * TICK_SECONDS / 60 for number in range(num_ticks)]
    load.step(minutes, [offered(60 * minute) for minute in minutes], color="black")
    load.set_ylabel("requests/s")
    for number, (signal, run) in enumerate(runs.items()):
        color = f"C{number}"
        pods.step(minutes, run.replicas, color=color, label=signal)
        pods.step(minutes, run.asked, color=color, linewidth=0.8, linestyle=":")
        longest = _longest_by_minute(run.waits)
        waits.plot(list(longest), list(longest.values()), color=color)
    pods.set_ylabel("pods (dotted: that take requests)")
    pods.set_ylim(bottom=0)
    pods.legend(fontsize="small")
    waits.set_ylabel("longest wait of a minute, s")
    waits.set_xlabel("minutes, simulated")
    figure.tight_layout()
    figure.savefig(file, dpi=100, metadata={"Software": None})
    plt.close(figure)


def _longest_by_minute(waits: list[tuple[float, float]]) -> dict[int, float]:
    longest: dict[int, float] = {}
    for at, wait in waits:
        minute = int(at / 60)
        longest[minute] = max(wait, longest.get(minute, 0.0))
    return longest
