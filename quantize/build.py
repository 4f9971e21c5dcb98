"""Source -> graph -> quantized graph -> gate -> the files beside it: one stage after the other, and
only files pass between them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from . import MODEL_FILE
from .errors import QuantizeError
from .precision import Choice
from .sources import Source

if TYPE_CHECKING:
    from .gate import Gate


_FINITE_TOKENS = 32  # of each row of the gate's text


def build(source: Source, folder: Path, choice: Choice, gate: Gate | None) -> None:
    """Exports `source` and writes everything that the server needs into `folder`.

    Raises QualityTooLow if the quantized graph does not pass `gate`, and QuantizeError, before any
    work, if the precision cannot be had.
    """
    # Imported here: they take seconds, and a wrong argument should be told at once.
    from . import record
    from .export import read_config
    from .rewrite import rewrite

    _check(source, choice)
    config = read_config(source.folder)
    quantization: dict[str, Any] = {}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="plain-") as scratch:
        plain = Path(scratch)
        bar: tqdm[NoReturn]
        with tqdm(total=config.num_hidden_layers, unit="layer", mininterval=0.5) as bar:
            _write_graph(source, plain, choice, _on(bar))
        if choice.graph_dtype == "fp16":
            _require_finite(source, plain)
        if choice.is_quantized:
            with tqdm(
                unit="matrix", mininterval=0.5, desc=f"quantizing to {choice.precision}"
            ) as bar:
                quantization = rewrite(plain, folder, choice.method(), bar.update)
            if gate is not None:
                found = gate.judge(source, plain, folder)
        else:
            for file in plain.iterdir():
                file.rename(folder / file.name)
    record.write(source, folder, choice, quantization, found)


def _require_finite(source: Source, folder: Path) -> None:
    """Weights and activations beyond 65,504 are infinite in fp16."""
    import numpy as np
    from transformers import AutoTokenizer

    from .compare import gate_ids
    from .reference import Reference

    tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
    ids = gate_ids(tokenizer, _FINITE_TOKENS)
    reference = Reference(folder, ids)
    if not all(np.isfinite(reference.logits(column)).all() for column in range(ids.shape[1])):
        raise QuantizeError(
            "in fp16 the model gives NaN or infinite logits for an ordinary text: it needs a wider "
            "range. Build it for the CPU (int8, int4 or fp32)"
        )


def _check(source: Source, choice: Choice) -> None:
    wanted = choice.graph_dtype
    what = f"{choice.precision} for {choice.device}"
    if source.graph is not None and source.dtype != wanted:
        raise QuantizeError(
            f"the graph is in {source.dtype}, and {what} is made of a graph in {wanted}; a graph "
            f"is not converted: give an export in {wanted}, or the Hugging Face model"
        )
    if source.graph is None and source.form == "portable" and wanted == "fp16":
        raise QuantizeError(
            f"its graph is portable, which is exported in fp32 only: {what} cannot be had; int8, "
            "int4 and fp32 for the CPU can"
        )


def _write_graph(
    source: Source, folder: Path, choice: Choice, on_stage: Callable[[str], None]
) -> None:
    """The graph that is published as it is, or quantized."""
    from .export import export_fused
    from .graph_copy import copy_graph
    from .portable import export_portable

    if source.graph is not None:
        copy_graph(source.graph, folder)
        if source.form == "fused":
            _mend_windows(source, folder)
    elif source.form == "fused":
        export_fused(source.folder, folder, on_stage, choice.graph_dtype)
    else:
        export_portable(source.folder, folder, on_stage)


def _mend_windows(source: Source, folder: Path) -> None:
    """Graph builders may leave a sliding window out; where they name their nodes as the one here
    does, each layer gets transformers' own."""
    from .attention import NODE, set_attention
    from .export import read_config
    from .families import FUSED
    from .graph_file import load_graph

    config = read_config(source.folder)
    model = load_graph(folder / MODEL_FILE)
    is_known = (config.architectures or [""])[0] in FUSED
    if is_known and any(NODE.fullmatch(node.name) for node in model.graph.node):
        set_attention(model.graph, config)
        (folder / MODEL_FILE).write_bytes(model.SerializeToString())


def _on(bar: tqdm[NoReturn]) -> Callable[[str], None]:
    def on_stage(line: str) -> None:
        bar.set_description(line.split(" in ")[0])
        bar.update(line.startswith("Reading layer"))

    return on_stage
