"""The gate: quality, size, memory and speed of a quantized graph beside the unquantized one's,
on the screen and for quantization.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
from tqdm import tqdm

from . import MODEL_FILE
from .errors import QuantizeError
from .floor import Floor, Quality, QualityTooLow
from .sources import Source
from .space import available_memory

_WINDOW = 256  # tokens of a row, at most
_ROOM = 2  # of memory, for each byte of a graph that is run


@dataclass(frozen=True, slots=True)
class Gate:
    floor: Floor
    allow_quality_loss: bool = False
    device: str = "cpu"  # speed is measured if this is the one that the gate runs on

    def judge(self, source: Source, reference: Path, candidate: Path) -> dict[str, Any]:
        """Compares `candidate` with `reference`, both built from `source`; prints the table.

        Returns what was found. Raises QualityTooLow below the floor unless losses are allowed.
        """
        # Imported here: they take seconds, and a wrong argument should be told at once.
        from transformers import AutoTokenizer

        from .compare import compare, gate_ids
        from .export import read_config
        from .rotary import context_length

        config = read_config(source.folder)
        window = min(_WINDOW, context_length(config))
        tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
        ids = gate_ids(tokenizer, window)
        bar: tqdm[NoReturn]
        with tqdm(
            total=100, unit="%", mininterval=0.5, desc="comparing with the unquantized graph"
        ) as bar:
            quality = compare(reference, candidate, ids, lambda share: _show(bar, share))
        shortfalls = self.floor.shortfalls(quality)
        is_refused = bool(shortfalls) and not self.allow_quality_loss
        # Speed takes a while, and is of no interest in what is not published.
        is_timed = self.device == "cpu" and not is_refused
        folders = {"reference": reference, "quantized": candidate}
        measured, note = _measure(folders, window if is_timed else 0)
        click.echo("\n" + table(quality, measured, self.floor) + note)
        if is_refused:
            raise QualityTooLow(
                "the quantized model differs too much from the unquantized one, so it is not "
                f"published: {'; '.join(shortfalls)}. --allow-quality-loss publishes it all the "
                "same."
            )
        if shortfalls:
            click.echo(f"published below the floor, as asked for: {'; '.join(shortfalls)}")
        return {
            "provider": "CPUExecutionProvider",
            "quality": dataclasses.asdict(quality),
            "floor": dataclasses.asdict(self.floor),
            "shortfalls": shortfalls,
            "measured": measured,
        }


def _show(bar: tqdm[NoReturn], share: float) -> None:
    bar.update(round(100 * share) - bar.n)


def _measure(folders: dict[str, Path], window: int) -> tuple[dict[str, dict[str, float]], str]:
    """Sizes, speed and memory of both, and a line if one could not be run here; sizes only for a
    window of 0."""
    from .speed import measure_in_turns

    sizes = {
        name: sum(file.stat().st_size for file in folder.glob(f"{MODEL_FILE}*"))
        for name, folder in folders.items()
    }
    # ONNX Runtime holds a weight twice while it packs it, and the cache comes on top.
    fits = {
        name: folder for name, folder in folders.items() if _ROOM * sizes[name] < available_memory()
    }
    measured: dict[str, dict[str, float]] = {}
    note = ""
    if window:
        click.echo("measuring speed and memory")
        try:
            measured = measure_in_turns(fits, window)
        except QuantizeError as error:  # it only informs
            note = f"\nspeed was not measured: {error}"
    note += "".join(
        f"\nthe {name} graph was not run whole: {size / 1e9:,.1f} GB would not fit in memory here"
        for name, size in sizes.items()
        if window and name not in fits
    )
    return {name: {"bytes": size} | measured.get(name, {}) for name, size in sizes.items()}, note


def table(quality: Quality, measured: dict[str, dict[str, float]], floor: Floor) -> str:
    """Both graphs side by side, and the measures of the gate with their limits."""
    plain, quantized = measured["reference"], measured["quantized"]
    lines = []
    for key, title, unit, digits in (
        ("bytes", "on disk, MB", 1e6, 0),
        ("model_memory_bytes", "memory of the model, MB", 1e6, 0),
        ("prefill_tokens_per_second", "prefill, tokens/s", 1, 1),
        ("decode_1_tokens_per_second", "decode of 1 row, tokens/s", 1, 1),
        ("decode_16_tokens_per_second", "decode of 16 rows, tokens/s", 1, 1),
    ):
        both = (f"{m[key] / unit:,.{digits}f}" if key in m else "-" for m in (plain, quantized))
        lines.append((title, *both))
    lines.append(("perplexity", f"{quality.reference_perplexity:.3f}", f"{quality.perplexity:.3f}"))
    rows = [f"{title:28} {left:>10} {right:>10}" for title, left, right in lines]
    return "\n".join(
        [
            f"{'':28} {'plain':>10} {'quantized':>10}",
            *rows,
            f"over {quality.num_tokens} tokens: mean KL {quality.mean_kl:.4f} (at most "
            f"{floor.max_mean_kl}), top-1 agreement {quality.top1_agreement:.4f} (at least "
            f"{floor.min_top1_agreement}), perplexity ratio {quality.perplexity_ratio:.4f} "
            f"(at most {floor.max_perplexity_ratio})",
        ]
    )
