"""`python -m quantize MODEL --output DIR`: builds a model folder that `python -m app` serves."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click
from tqdm import tqdm

from .errors import QuantizeError
from .publish import Workplace
from .sources import Source, resolve

# Long stages report through one bar; their own lines would be hundreds.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

_WHY_INT8 = "8-bit weights with a scale per 32: nearly the fp32 answers, smaller and faster"


@click.command("python -m quantize")
@click.argument("model")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "int8"]),
    default="auto",
    show_default=True,
    help="auto takes int8 (8-bit weights, MatMulNBits).",
)
@click.option("--force", is_flag=True, help="Replace the output folder if it exists.")
def main(model: str, output: Path, precision: str, force: bool) -> None:
    """Builds a model folder from MODEL: 'default', a Hugging Face folder or a .gguf file."""
    if precision == "auto":
        precision = "int8"
        click.echo(f"precision int8: {_WHY_INT8}")
    started_at = time.monotonic()
    try:
        with Workplace(output, replace=force) as workplace:
            with resolve(model, workplace.cache, workplace.scratch) as source:
                build(source, workplace.folder, precision)
            workplace.publish()
    except QuantizeError as error:
        click.echo(f"quantize: {error}", err=True)
        sys.exit(2)
    size = sum(path.stat().st_size for path in output.rglob("*"))
    click.echo(f"{output}: {size / 1e6:,.0f} MB in {time.monotonic() - started_at:.0f} s")


def build(source: Source, folder: Path, precision: str) -> None:
    """Exports `source` and writes everything that the server needs into `folder`."""
    # Imported here: they take seconds, and a wrong argument should be told at once.
    from . import record
    from .export import export_fused, read_config
    from .int8 import quantize_int8

    num_layers = read_config(source.folder).num_hidden_layers
    num_quantized = 0
    bar: tqdm[NoReturn]
    with tqdm(total=num_layers, unit="layer", mininterval=0.5) as bar:
        if precision == "fp32":
            export_fused(source.folder, folder, _on(bar))
        else:
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fp32-") as plain:
                export_fused(source.folder, Path(plain), _on(bar))
                bar.set_description("quantizing to int8")
                num_quantized = quantize_int8(Path(plain), folder)
        bar.set_description("done")
    record.write(source, folder, precision, num_quantized)


def _on(bar: tqdm[NoReturn]) -> Callable[[str], None]:
    def on_stage(line: str) -> None:
        bar.set_description(line.split(" in ")[0], refresh=False)
        bar.update(line.startswith("Reading layer"))

    return on_stage


if __name__ == "__main__":
    main()
