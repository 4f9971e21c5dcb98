"""`python -m quantize MODEL --output DIR`: builds a model folder that `python -m app` serves."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import click

from .build import build
from .commands import BuildOrCheck
from .errors import QuantizeError
from .gate import Gate
from .precision import DEVICES, PRECISIONS, choose
from .publish import Workplace
from .sources import resolve
from .space import Size, is_out_of_space, require_space, temporaries_in
from .versions import check_versions

# Long stages report through one bar; their own lines would be hundreds.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@click.command("python -m quantize", cls=BuildOrCheck)
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit of a Hugging Face id.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option(
    "--precision",
    type=click.Choice(["auto", *PRECISIONS]),
    default="auto",
    show_default=True,
    help="auto takes int8 for the CPU, fp16 for CUDA.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", *DEVICES]),
    default="auto",
    show_default=True,
    help="What will serve it; auto takes what is here.",
)
@click.option("--allow-slow", is_flag=True, help="Build a precision that is slow on the device.")
@click.option(
    "--reduce-range", is_flag=True, help="7-bit weights, for CPUs without an 8-bit dot product."
)
@click.option(
    "--max-kl", type=click.FloatRange(0), help="Gate: largest mean KL. [int8: 0.05, int4: 0.25]"
)
@click.option(
    "--min-top1", type=click.FloatRange(0, 1), help="Gate: least agreement. [int8: 0.93, int4: 0.7]"
)
@click.option(
    "--max-perplexity-ratio",
    type=click.FloatRange(0),
    help="Gate: largest ratio. [int8: 1.03, int4: 1.2]",
)
@click.option("--allow-quality-loss", is_flag=True, help="Publish below the gate's floor, too.")
@click.option("--force", is_flag=True, help="Replace the output folder if it exists.")
def main(
    model: str,
    revision: str | None,
    output: Path,
    precision: str,
    device: str,
    allow_slow: bool,
    reduce_range: bool,
    max_kl: float | None,
    min_top1: float | None,
    max_perplexity_ratio: float | None,
    allow_quality_loss: bool,
    force: bool,
) -> None:
    """Builds a model folder from MODEL: 'default', a Hugging Face id or folder, a .gguf file, or a
    folder with an ONNX export, which is quantized only.

    A quantized model is compared with the unquantized one on a text that comes along, and not
    published if it differs by more than the gate allows.
    """
    started_at = time.monotonic()
    try:
        click.echo(check_versions())
        choice = choose(precision, device, allow_slow=allow_slow, reduce_range=reduce_range)
        click.echo(f"precision {choice.precision} for {choice.device}: {choice.reason}")
        limits = (max_kl, min_top1, max_perplexity_ratio)
        if not choice.is_quantized and (allow_quality_loss or limits != (None, None, None)):
            raise QuantizeError(
                f"{choice.precision} is not quantized and passes no gate: leave out --max-kl, "
                "--min-top1, --max-perplexity-ratio and --allow-quality-loss"
            )
        gate = Gate(choice.floor.moved(*limits), allow_quality_loss, choice.device)
        with Workplace(output, replace=force) as workplace:
            scratch = workplace.scratch

            def tell(size: Size) -> None:
                click.echo(require_space(size, choice, scratch))

            with (
                temporaries_in(scratch),
                resolve(model, workplace.cache, scratch, revision=revision, on_size=tell) as source,
            ):
                build(source, workplace.folder, choice, gate)
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


if __name__ == "__main__":
    main()
