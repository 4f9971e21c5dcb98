"""Measure every form of one model in one run: speed, memory and size against quality.

    python scripts/compare_forms.py [--model default] [--forms int8,int4,...] [--repeats 5]
        [--tokens 256] [--json FILE]

Builds all forms in a temporary folder (5 GB for the default model) with the code of `quantize`, but
for `plain`, which is optimum's own export with its defaults. `plain` and `fp32` are always among
them, for the others are compared with both:

    KL, top-1, ppl   against `fp32` over the gate's text (quantize/compare.py); `plain` too, which
                     shows that it is the same model
    tokens/s, memory as the gate measures them (quantize/speed.py), each in a process of its own;
                     all forms once, then all again, so that a machine that slows down for a minute
                     slows all. Medians over the repeats.
    ratios           taken within each repeat: median (min..max) of those

The forms `int8-unrotated`, `-unmixed` and `-bare` leave out a part of `int8`, to show what it is
for. The default model takes 9 minutes on 2 cores, 25 s of that to compare and 7 s a repeat for each
form. The last line on stdout is one JSON object with everything; progress goes to stderr.
"""

import contextlib
import dataclasses
import functools
import io
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import bench
import click

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a script's own path is scripts/, not the root
from quantize import MODEL_FILE, per_token  # noqa: E402 (needs the line above)
from quantize.compare import compare, gate_ids  # noqa: E402
from quantize.errors import QuantizeError  # noqa: E402
from quantize.export import export_fused, read_config  # noqa: E402
from quantize.floor import Quality  # noqa: E402
from quantize.per_token import PerToken  # noqa: E402
from quantize.precision import choose  # noqa: E402
from quantize.record import tool_versions  # noqa: E402
from quantize.rewrite import rewrite  # noqa: E402
from quantize.rotary import context_length  # noqa: E402
from quantize.rotation import CannotRotate  # noqa: E402
from quantize.sources import Source, resolve  # noqa: E402
from quantize.speed import measure_in_turns  # noqa: E402
from quantize.weight_only import WeightOnly  # noqa: E402

WINDOW = 256  # tokens of a row of the gate's text, as the gate has it
Run = dict[str, dict[str, float]]  # one repeat: form -> measure -> value


def no_rotation(*_: object) -> NoReturn:
    raise CannotRotate("left out, for comparison")


def no_block(_: PerToken, value: str, width: int) -> int:
    return 0


@dataclass(frozen=True)
class Form:
    """`method` makes the quantize.rewrite.Method; None: not quantized.

    `left_out` names functions of quantize/per_token.py and what takes their place: parts of int8
    that nobody would want to switch off, so that `quantize` has no switch for them.
    """

    what: str
    method: Callable[[], Any] | None = None
    left_out: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def chosen(precision: str) -> Callable[[], Any]:
    return lambda: choose(precision, "cpu").method()


FORMS = {
    "plain": Form("optimum's own graph"),
    "fp32": Form("fused graph, unquantized"),
    "int8": Form("8-bit weights and activations, a scale per token", chosen("int8")),
    "int8-weights": Form("8-bit weights only", lambda: functools.partial(WeightOnly)),
    "int4": Form("4-bit weights in the MLP, 8-bit ones elsewhere", chosen("int4")),
    "int8-dynamic": Form("one activation scale for all rows", chosen("int8-dynamic")),
    "int8-unrotated": Form(
        "int8, the hidden state mixed at run time instead of rotated at build time",
        chosen("int8"),
        {"rotate": no_rotation},
    ),
    "int8-unmixed": Form(
        "int8, what cannot be rotated left as it is", chosen("int8"), {"_block": no_block}
    ),
    "int8-bare": Form(
        "int8, neither rotated nor mixed",
        chosen("int8"),
        {"rotate": no_rotation, "_block": no_block},
    ),
}
RATIOS = ("plain", "fp32")
# Key, title, unit and digits of the columns that have a number per repeat.
COLUMNS = (
    ("bytes", "disk MB", 1e6, 0),
    ("model_memory_bytes", "memory MB", 1e6, 0),
    ("prefill_tokens_per_second", "prefill", 1, 0),
    ("decode_1_tokens_per_second", "decode 1", 1, 1),
    ("decode_16_tokens_per_second", "decode 16", 1, 0),
)


def export_plain(source: Path, folder: Path) -> None:
    """What `optimum-cli export onnx` writes. optimum's own comparison with torch is left out: the
    graph is compared with the fused one over the whole text."""
    from optimum.exporters.onnx import main_export

    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # a line per branch that is traced
        main_export(
            str(source),
            output=folder,
            task="text-generation-with-past",
            dtype="fp32",
            local_files_only=True,
            do_validation=False,
        )


def build(names: Sequence[str], source: Path, root: Path) -> dict[str, dict[str, Any]]:
    """Every form in a folder of `root`; what was done to each that is quantized."""
    done: dict[str, dict[str, Any]] = {}
    for name in names:
        click.echo(f"building {name}", err=True)
        form = FORMS[name]
        folder = root / name
        folder.mkdir()
        if name == "plain":
            export_plain(source, folder)
        elif form.method is None:
            export_fused(source, folder, lambda _: None)
        else:
            with contextlib.ExitStack() as patches:
                for function, instead in form.left_out.items():
                    owner = PerToken if hasattr(PerToken, function) else per_token
                    patches.enter_context(mock.patch.object(owner, function, instead))
                done[name] = rewrite(root / "fp32", folder, form.method())
    return done


def judge(names: Sequence[str], source: Path, root: Path) -> dict[str, Quality]:
    """All forms but fp32 against it, over the gate's text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    ids = gate_ids(tokenizer, min(WINDOW, context_length(read_config(source))))
    qualities = {}
    for name in names:
        if name != "fp32":
            started_at = time.monotonic()
            qualities[name] = compare(root / "fp32", root / name, ids)
            seconds = time.monotonic() - started_at
            click.echo(f"comparing {name} with fp32 took {seconds:.0f} s", err=True)
    return qualities


def measure(names: Sequence[str], root: Path, num_tokens: int, repeats: int) -> list[Run]:
    """One run per repeat, with the constant size on disk among its measures."""
    folders = {name: root / name for name in names}
    sizes = {
        name: sum(file.stat().st_size for file in folder.glob(f"{MODEL_FILE}*"))
        for name, folder in folders.items()
    }
    runs = []
    for repeat in range(repeats):
        click.echo(f"measuring, {repeat + 1} of {repeats}", err=True)
        found = measure_in_turns(folders, num_tokens, repeats=1)
        runs.append({name: {"bytes": sizes[name]} | found[name] for name in names})
    return runs


def summarize(
    name: str, runs: Sequence[Run], quality: Quality | None, done: dict[str, Any] | None
) -> dict[str, Any]:
    """Everything of one form, for the report."""
    series = {key: [run[name][key] for run in runs] for key in runs[0][name]}
    report: dict[str, Any] = {"form": name, "what": FORMS[name].what, "quantization": done}
    report["quality"] = quality and (
        dataclasses.asdict(quality) | {"perplexity_ratio": quality.perplexity_ratio}
    )
    report["measured"] = {key: statistics.median(values) for key, values in series.items()}
    report["runs"] = series
    for base in RATIOS:
        ratios = {key: [run[name][key] / run[base][key] for run in runs] for key in series}
        report[f"ratio_to_{base}"] = {
            key: {"median": round(statistics.median(r), 4)}
            | {"min": round(min(r), 4), "max": round(max(r), 4)}
            for key, r in ratios.items()
        }
    return report


def quality_and_medians(rows: Sequence[dict[str, Any]]) -> list[str]:
    titles = ["mean KL", "top-1", "ppl ratio", *(title for _, title, _, _ in COLUMNS)]
    lines = [f"{'form':15}" + "".join(f"{title:>11}" for title in titles)]
    for row in rows:
        found = row["quality"]
        names = ("mean_kl", "top1_agreement", "perplexity_ratio")
        cells = [f"{found[name]:z.4f}" if found else "-" for name in names]
        cells += [f"{row['measured'][k] / unit:,.{digits}f}" for k, _, unit, digits in COLUMNS]
        lines.append(f"{row['form']:15}" + "".join(f"{cell:>11}" for cell in cells))
    return lines


def ratios_to(base: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    titles = (title.removesuffix(" MB") for _, title, _, _ in COLUMNS)
    lines = [f"{f'/ {base}':15}" + "".join(f"{title:>20}" for title in titles)]
    for row in rows:
        if row["form"] != base:
            found = [row[f"ratio_to_{base}"][key] for key, *_ in COLUMNS]
            cells = [f"{r['median']:.2f} ({r['min']:.2f}..{r['max']:.2f})" for r in found]
            lines.append(f"{row['form']:15}" + "".join(f"{cell:>20}" for cell in cells))
    return lines


def check(source: Source, num_tokens: int) -> None:
    """Raises QuantizeError for a model that does not have all forms, or is not long enough."""
    if source.kind != "hf" or source.form != "fused":
        raise QuantizeError(
            f"{source.name} has no fused graph that could be made of it: give a Hugging Face "
            "folder or a GGUF file of a family in the README's table"
        )
    if num_tokens > (context := context_length(read_config(source.folder))):
        raise QuantizeError(f"--tokens {num_tokens} is more than its context of {context} tokens")


def parse_forms(_: click.Context, __: click.Parameter, text: str) -> list[str]:
    """In the order of FORMS, with those that the others are compared with."""
    asked = text.split(",")
    if unknown := [name for name in asked if name not in FORMS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(FORMS)}")
    return [name for name in FORMS if name in (*RATIOS, *asked)]


@click.command()
@click.option("--model", default="default", show_default=True, help="As for python -m quantize.")
@click.option("--forms", default=",".join(FORMS), show_default=True, callback=parse_forms)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@click.option(
    "--tokens", default=256, show_default=True, type=click.IntRange(2), help="A prompt's."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
def main(model: str, forms: list[str], repeats: int, tokens: int, json_file: Path | None) -> None:
    """Measure every form of one model in one run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the forms are removed
    cache = ROOT / "models" / ".cache"  # where `make model` keeps the download
    with tempfile.TemporaryDirectory(prefix="compare-forms-") as scratch:
        root = Path(scratch)
        try:
            with resolve(model, cache, root) as source:
                check(source, tokens)
                done = build(forms, source.folder, root)
                qualities = judge(forms, source.folder, root)
                name = source.name
            runs = measure(forms, root, tokens, repeats)
        except QuantizeError as error:
            raise click.ClickException(str(error)) from error
    rows = [summarize(form, runs, qualities.get(form), done.get(form)) for form in forms]
    lines = quality_and_medians(rows)
    for base in RATIOS:
        lines += ["", *ratios_to(base, rows)]
    click.echo("\n".join(lines))
    config = {"model": name, "repeats": repeats, "tokens": tokens}
    bench.publish({"config": config, "versions": tool_versions(), "forms": rows}, json_file)


if __name__ == "__main__":
    main()
