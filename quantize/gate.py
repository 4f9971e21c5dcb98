"""The gate: quality, size, memory and speed of a quantized graph beside the fp32 graph's,
on the screen and for quantization.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
from tqdm import tqdm

from . import MODEL_FILE
from .floor import Floor, Quality, QualityTooLow

_WINDOW = 256  # tokens of a row, at most


@dataclass(frozen=True, slots=True)
class Gate:
    floor: Floor
    allow_quality_loss: bool = False

    def judge(self, source: Path, reference: Path, candidate: Path) -> dict[str, Any]:
        """Compares `candidate` with `reference`, both built from `source`; prints the table.

        Returns what was found. Raises QualityTooLow below the floor unless losses are allowed.
        """
        # Imported here: they take seconds, and a wrong argument should be told at once.
        from transformers import AutoTokenizer

        from .compare import compare, gate_ids
        from .export import read_config
        from .speed import measure_in_turns

        context: int = read_config(source).max_position_embeddings
        window = min(_WINDOW, context)
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        ids = gate_ids(tokenizer, window)
        bar: tqdm[NoReturn]
        with tqdm(total=ids.shape[1] - 1, unit="step", mininterval=0.5) as bar:
            bar.set_description("comparing with fp32")
            quality = compare(reference, candidate, ids, bar.update)
        shortfalls = self.floor.shortfalls(quality)
        if shortfalls and not self.allow_quality_loss:
            raise QualityTooLow(
                "the quantized model differs too much from the fp32 model, so it is not published: "
                f"{'; '.join(shortfalls)}. --allow-quality-loss publishes it all the same."
            )
        click.echo("measuring speed and memory")
        folders = {"reference": reference, "quantized": candidate}
        measured = measure_in_turns(folders, window)
        for name, folder in folders.items():
            sizes = [file.stat().st_size for file in folder.glob(f"{MODEL_FILE}*")]
            measured[name]["bytes"] = sum(sizes)
        click.echo("\n" + table(quality, measured, self.floor))
        return {
            "quality": dataclasses.asdict(quality),
            "floor": dataclasses.asdict(self.floor),
            "shortfalls": shortfalls,
            "measured": measured,
        }


def table(quality: Quality, measured: dict[str, dict[str, float]], floor: Floor) -> str:
    """Both graphs side by side, and the measures of the gate with their limits."""
    plain, quantized = measured["reference"], measured["quantized"]
    lines = [
        ("on disk, MB", *(f"{m['bytes'] / 1e6:,.0f}" for m in (plain, quantized))),
        ("peak memory, MB", *(f"{m['peak_memory_bytes'] / 1e6:,.0f}" for m in (plain, quantized))),
    ]
    for key, title in (
        ("prefill_tokens_per_second", "prefill, tokens/s"),
        ("decode_1_tokens_per_second", "decode of 1 row, tokens/s"),
        ("decode_16_tokens_per_second", "decode of 16 rows, tokens/s"),
    ):
        lines.append((title, f"{plain[key]:,.1f}", f"{quantized[key]:,.1f}"))
    lines.append(("perplexity", f"{quality.reference_perplexity:.3f}", f"{quality.perplexity:.3f}"))
    rows = [f"{title:28} {left:>10} {right:>10}" for title, left, right in lines]
    return "\n".join(
        [
            f"{'':28} {'fp32':>10} {'quantized':>10}",
            *rows,
            f"over {quality.num_tokens} tokens: mean KL {quality.mean_kl:.4f} (at most "
            f"{floor.max_mean_kl}), top-1 agreement {quality.top1_agreement:.4f} (at least "
            f"{floor.min_top1_agreement}), perplexity ratio {quality.perplexity_ratio:.4f} "
            f"(at most {floor.max_perplexity_ratio})",
        ]
    )
