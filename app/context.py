"""How many tokens of a model are served, and how far back its attention looks.

A folder may promise more than its graph keeps; what an operator should know of that becomes a
warning.
"""

from __future__ import annotations

from pathlib import Path

from .folder import CONFIG_FILE, read_claims, read_context_length
from .graph import Graph
from .record import read_record


def served_context(folder: Path, graph: Graph) -> int:
    """The folder's own number; up to where the graph's rotary factors change, if they do."""
    named = read_context_length(folder)
    return named if graph.short_context is None else min(named, graph.short_context)


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


def window_warnings(folder: Path, graph: Graph, served: int) -> list[str]:
    """That the graph's attention looks further back, or less far, than config.json has it.

    Some builders leave a window out. Which layers have one is the model type's business: in some
    types not all of them.
    """
    config = next((claims for claims in read_claims(folder) if claims.file == CONFIG_FILE), None)
    if config is None or not graph.windows:
        return []
    asked = _effective(config.sliding_window, served)
    found = {_effective(window, served) for window in graph.windows}
    if asked in found and found <= {asked, None}:
        return []
    sizes = ", ".join(str(window) for window in sorted(graph.windows))
    return [
        f"{CONFIG_FILE} asks for {f'a sliding window of {asked}' if asked else 'no sliding window'}"
        f", the graph's local_window_size is {sizes} (-1: none): long prompts get other answers "
        "than in transformers"
    ]


def _effective(window: int | None, served: int) -> int | None:
    """A window as wide as what is served hides nothing."""
    return None if window is None or window < 0 or window >= served else window
