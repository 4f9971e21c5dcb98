"""The page of a comparison with peers: tables in Markdown, and the same as a plot."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import OURS


@dataclass(frozen=True)
class Measured:
    """One server at one load. `rates`: generated tokens/s of each turn; `ratios`: ours / it."""

    peer: str
    concurrency: int
    prompt_tokens: int
    rates: Sequence[float]
    ratios: Sequence[float]
    ttft_ms: float | None  # median of the turns' p50
    memory_bytes: int
    failed: int

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def write_page(
    page: Path,
    measured: Sequence[Measured],
    absent: Mapping[str, str],
    config: Mapping[str, Any],
    servers: Mapping[str, Mapping[str, Any]],
    machine: Mapping[str, Any],
    plot_file: Path | None,
) -> None:
    lines = ["# Peers", "", *_introduction(config, machine)]
    for prompt_tokens in config["prompt_tokens"]:
        here = [found for found in measured if found.prompt_tokens == prompt_tokens]
        lines += ["", f"## Prompts of {prompt_tokens} tokens", "", *_tables(here)]
    if plot_file:
        lines += ["", f"![tokens/s by number of clients]({plot_file.name})"]
    else:
        lines += ["", "No plot: matplotlib is not installed."]
    lines += ["", "## Servers", ""]
    for name, command in config["commands"].items():
        told = ", ".join(_facts(servers[name]))
        lines.append(f"- {name}: `{command}`{f' ({told})' if told else ''}")
    lines += [f"- {name} is absent: {why}" for name, why in absent.items()]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines) + "\n")


def _facts(said: Mapping[str, Any]) -> list[str]:
    """Without the folders of this machine."""
    facts: list[str] = []
    for key, value in said.items():
        shown = Path(value).name if str(value).startswith("/") else value
        facts += _facts(value) if isinstance(value, dict) else [f"{key} {shown}"]
    return facts


def _introduction(config: Mapping[str, Any], machine: Mapping[str, Any]) -> list[str]:
    amx = ", AMX" if machine["amx"] else ""
    return [
        f"`scripts/compare_peers.py`, {machine['date'][:10]}, {machine['cpu']}{amx},"
        f" {machine['cores']} cores, Python {machine['python']}. Client and servers share them.",
        f"All prompts different, {config['output_tokens']} generated tokens a request,"
        f" turns of each server in turn: {config['repeats']}; medians, with (min..max).",
        "A ratio is ours / the peer's tokens/s within a turn. A server that does not stream has"
        " the time of its whole answer as first token. Memory is resident, the largest of all.",
    ]


def _tables(measured: Sequence[Measured]) -> list[str]:
    peers = list(dict.fromkeys(found.peer for found in measured))
    loads = sorted({found.concurrency for found in measured})
    cells = {(found.peer, found.concurrency): found for found in measured}
    rows = [[peer, *(cells[peer, load] for load in loads)] for peer in peers]
    titles = [f"N={load}" for load in loads]
    lines = ["tokens/s, and first token in ms (p50):", ""]
    lines += _header(["server", *titles, *(f"first, {title}" for title in titles), "memory"])
    for name, *found in rows:
        memory = f"{max(cell.memory_bytes for cell in found) / 1e9:.2f} GB"
        firsts = ["-" if cell.ttft_ms is None else f"{cell.ttft_ms:.0f}" for cell in found]
        lines.append(
            _line([name, *(_spread(c.rates, 1, c.failed) for c in found), *firsts, memory])
        )
    lines += ["", f"{OURS} / peer:", "", *_header(["server", *titles])]
    for name, *found in rows:
        if name != OURS:
            lines.append(_line([name, *(_spread(cell.ratios, 2) for cell in found)]))
    return lines


def _header(titles: Sequence[str]) -> list[str]:
    return [_line(titles), _line(["---"] * len(titles))]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float], digits: int, failed: int = 0) -> str:
    middle = f"{statistics.median(values):.{digits}f}"
    between = f" ({min(values):.{digits}f}..{max(values):.{digits}f})" if len(values) > 1 else ""
    return middle + between + (f", {failed} FAILED" if failed else "")


def plot(measured: Sequence[Measured], file: Path) -> Path | None:
    """Tokens/s over clients, a panel for each prompt length; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({found.prompt_tokens for found in measured})
    figure, axes = pyplot.subplots(1, len(lengths), figsize=(6 * len(lengths), 4), squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=True):
        for peer in dict.fromkeys(found.peer for found in measured):
            points = [f for f in measured if (f.peer, f.prompt_tokens) == (peer, length)]
            points.sort(key=lambda found: found.concurrency)
            style = {"linewidth": 2.5, "color": "black"} if peer == OURS else {}
            clients = [found.concurrency for found in points]
            axis.plot(clients, [found.rate for found in points], "o-", label=peer, **style)
        axis.set(title=f"prompts of {length} tokens", xlabel="clients", ylabel="tokens/s")
        axis.set_xscale("log", base=2)
        loads = sorted({found.concurrency for found in measured})
        axis.set_xticks(loads, [str(load) for load in loads])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return file
