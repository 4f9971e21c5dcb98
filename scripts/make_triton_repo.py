"""Make a Triton model repository from one of our model folders.

    python scripts/make_triton_repo.py MODEL_FOLDER OUT [--link] [--engine-only]

OUT gets a folder for each model of deploy/triton: its configurations (config.pbtxt for a GPU,
configs/cpu.pbtxt for `--model-config-name=cpu`), its model.py, our engine (app/) and the model
folder. It is whole: it may be copied elsewhere, or uploaded. With --link the model folder is a
link, for trying it out here. With --engine-only there are phi3_mini and phi3_mini_once alone, which
need no backend but python's. OUT must not exist, or be empty.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "deploy" / "triton"
ENGINE_MODELS = ("phi3_mini", "phi3_mini_once")  # whose model.py calls app/
SERVED_MODELS = ("phi3_mini",)  # which need the model folder


def make_repository(
    model_folder: Path, out: Path, *, link: bool = False, engine_only: bool = True
) -> Path:
    """`out`. Raises click.ClickException for what cannot be made."""
    if not (model_folder / "model.onnx").exists() and not any(model_folder.glob("*.onnx")):
        raise click.ClickException(f"{model_folder} has no ONNX graph: it is no model folder")
    if out.exists() and any(out.iterdir()):
        raise click.ClickException(f"{out} is not empty")
    for name in ENGINE_MODELS:
        shutil.copytree(TEMPLATES / name, out / name, ignore=_no_caches)
        shutil.copytree(ROOT / "app", out / name / "1" / "app", ignore=_no_caches)
    for name in SERVED_MODELS:
        target = out / name / "1" / "model"
        if link:
            target.symlink_to(model_folder.resolve())
        else:
            shutil.copytree(model_folder, target)
    if not engine_only:
        _write_logits_models(model_folder, out)
    return out


def _write_logits_models(model_folder: Path, out: Path) -> None:
    from triton_logits import CannotServeLogits, write_logits_models

    try:
        write_logits_models(model_folder, out)
    except CannotServeLogits as error:
        raise click.ClickException(f"{error}\nWithout phi3_mini_logits: --engine-only") from None


_no_caches = shutil.ignore_patterns("__pycache__")


@click.command(help=__doc__)
@click.argument("model_folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--link", is_flag=True, help="Link to the model folder instead of copying it.")
@click.option("--engine-only", is_flag=True, help="No logits, no ensemble.")
def main(model_folder: Path, out: Path, link: bool, engine_only: bool) -> None:
    click.echo(make_repository(model_folder, out, link=link, engine_only=engine_only))


if __name__ == "__main__":
    main()
