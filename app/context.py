"""How many tokens of a model are served, and how far back its attention looks.

A folder may promise more than its graph keeps; what an operator should know of that becomes a
warning.
"""

from __future__ import annotations

from pathlib import Path

from .folder import read_claims, read_context_length
from .graph import Graph
from .record import has_record, read_record


def served_context(folder: Path, graph: Graph) -> int:
    """The folder's own number; of a graph brought along, up to where its rotary factors change."""
    named = read_context_length(folder)
    if graph.short_context is None or has_record(folder):
        return named
    return min(named, graph.short_context)


def context_warnings(folder: Path, served: int) -> list[str]:
    """That less is served than a file names, and why: in the words of the record, if it has any."""
    note = read_record(folder).context_note
    if note is not None:
        return [note]
    return [
        f"{claims.file} names a context of {claims.context_length} tokens, of which {served} are "
        "served: another file names fewer, or longer rows would change the rotary factors of all "
        "(longrope)"
        for claims in read_claims(folder)
        if claims.context_length is not None and claims.context_length > served
    ]
