"""`python -m quantize MODEL --output DIR`: builds a model folder that `python -m app` serves."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from tqdm import tqdm

from .errors import QuantizeError
from .floor import Floor
from .gate import Gate
from .publish import Workplace
from .sources import Source, resolve
from .space import Size, is_out_of_space, require_space, temporaries_in
from .versions import check_versions

# Long stages report through one bar; their own lines would be hundreds.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

_FLOOR = Floor()
_WHY_INT8 = "8-bit weights, a scale for each 32: nearly the fp32 answers in less than half the size"


@click.command("python -m quantize")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit of a Hugging Face id.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "int8"]),
    default="auto",
    show_default=True,
    help="auto takes int8 (8-bit weights, MatMulNBits).",
)
@click.option("--max-kl", default=_FLOOR.max_mean_kl, show_default=True, help="Gate: mean KL.")
@click.option(
    "--min-top1", default=_FLOOR.min_top1_agreement, show_default=True, help="Gate: agreement."
)
@click.option(
    "--max-perplexity-ratio", default=_FLOOR.max_perplexity_ratio, show_default=True, help="Gate."
)
@click.option("--allow-quality-loss", is_flag=True, help="Publish below the gate's floor, too.")
@click.option("--force", is_flag=True, help="Replace the output folder if it exists.")
def main(
    model: str,
    revision: str | None,
    output: Path,
    precision: str,
    max_kl: float,
    min_top1: float,
    max_perplexity_ratio: float,
    allow_quality_loss: bool,
    force: bool,
) -> None:
    """Builds a model folder from MODEL: 'default', a Hugging Face id or folder, a .gguf file, or a
    folder with an ONNX export, which is quantized only.

    A quantized model is compared with the unquantized one on a text that comes along, and not
    published if it differs by more than the gate allows.
    """
    gate = Gate(Floor(max_kl, min_top1, max_perplexity_ratio), allow_quality_loss)
    if precision == "auto":
        precision = "int8"
        click.echo(f"precision int8: {_WHY_INT8}")
    started_at = time.monotonic()
    try:
        click.echo(check_versions())
        with Workplace(output, replace=force) as workplace:
            scratch = workplace.scratch

            def tell(size: Size) -> None:
                click.echo(require_space(size, precision, scratch))

            with (
                temporaries_in(scratch),
                resolve(model, workplace.cache, scratch, revision=revision, on_size=tell) as source,
            ):
                build(source, workplace.folder, precision, gate)
            workplace.publish()
    except QuantizeError as error:
        _refuse(str(error))
    except Exception as error:
        if not is_out_of_space(error):
            raise
        _refuse(
            f"the disk is full ({error}); nothing was kept. Free some space, or give an --output "
            "on a larger disk"
        )
    size = sum(path.stat().st_size for path in output.rglob("*"))
    click.echo(f"{output}: {size / 1e6:,.0f} MB in {time.monotonic() - started_at:.0f} s")


def _refuse(message: str) -> NoReturn:
    click.echo(f"quantize: {message}", err=True)
    sys.exit(2)


def build(source: Source, folder: Path, precision: str, gate: Gate | None) -> None:
    """Exports `source` and writes everything that the server needs into `folder`.

    Raises QualityTooLow if the quantized graph does not pass `gate`, and QuantizeError, before any
    work, if the precision cannot be had.
    """
    # Imported here: they take seconds, and a wrong argument should be told at once.
    from . import record
    from .export import export_fused, read_config
    from .graph_copy import copy_graph
    from .int8 import quantize_int8
    from .onnx_source import check_precision
    from .portable import export_portable

    check_precision(source.dtype, precision)
    num_layers = read_config(source.folder).num_hidden_layers
    num_quantized = 0
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fp32-") as plain:
        bar: tqdm[NoReturn]
        with tqdm(total=num_layers, unit="layer", mininterval=0.5) as bar:
            if source.graph is not None:
                copy_graph(source.graph, Path(plain))
            elif source.form == "fused":
                export_fused(source.folder, Path(plain), _on(bar))
            else:
                export_portable(source.folder, Path(plain), _on(bar))
            if precision == "int8":
                bar.set_description("quantizing to int8")
                num_quantized = quantize_int8(Path(plain), folder)
            bar.set_description("done")
        if precision == "fp32":
            for file in Path(plain).iterdir():
                file.rename(folder / file.name)
        elif gate is not None:
            found = gate.judge(source.folder, Path(plain), folder)
    record.write(source, folder, precision, num_quantized, found)


def _on(bar: tqdm[NoReturn]) -> Callable[[str], None]:
    def on_stage(line: str) -> None:
        bar.set_description(line.split(" in ")[0])
        bar.update(line.startswith("Reading layer"))

    return on_stage


if __name__ == "__main__":
    main()
