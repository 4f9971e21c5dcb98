"""`python -m quantize check FOLDER`: is this model folder whole, and does it agree with itself?

Reads any folder with a decoder graph: ours, optimum's, ONNX Runtime GenAI's. Writes nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from .report import Report


@click.command("check")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--fast", is_flag=True, help="Skip what reads the weights: hashes and the session.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def check(folder: Path, fast: bool, as_json: bool) -> None:
    """Checks the model FOLDER and prints a report, a line for each finding.

    Exit status: 0 without errors (warnings may be there), 1 with errors, 2 for wrong use.
    """
    report = check_folder(folder, fast=fast)
    if as_json:
        click.echo(json.dumps({"folder": str(folder), **report.to_json()}, indent=2))
    else:
        click.echo("\n".join([*report.lines(), f"{folder}: {report.summary()}"]))
    sys.exit(1 if report.count("error") else 0)


def check_folder(path: Path, *, fast: bool = False) -> Report:
    """Goes on as far as it can: one report names all that is wrong."""
    # Imported here: they take seconds, and a wrong argument should be told at once.
    from . import check_attention, check_files, check_graph
    from .check_session import check_sessions
    from .check_text import check_text
    from .graph_facts import graph_facts
    from .model_folder import read_folder

    report = Report()
    folder = read_folder(path, report)
    model = check_files.read_graph(folder.graph, report) if folder.graph else None
    vocab_size = None
    if model is None:
        check_files.check_table(folder, report, fast=fast)
    else:
        referred = check_files.check_weights(folder, model, report)
        referred |= check_files.check_table(folder, report, fast=fast)
        check_files.check_leftovers(folder, referred, report)
        facts = graph_facts(model)
        vocab_size = facts.vocab_size
        check_graph.check_operators(model, report)
        check_graph.check_form(facts, folder, report)
        check_graph.check_shape(facts, folder, report)
        check_attention.check_window(facts, folder, report)
        check_attention.check_rope(facts, folder, report)
        check_graph.check_placement(model, facts, folder, report)
    check_text(folder, vocab_size, report)
    if model is not None and not fast:
        check_sessions(folder, report)
    return report
