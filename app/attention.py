"""What a graph's attention nodes say: which form it has, and how far they look.

"fused": GroupQueryAttention appends to the cache in place and finds each row's end by the mask.
"portable": the new keys are concatenated to the old ones; a row's place is up to us.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import onnx

from .errors import UnservableModel

Form = Literal["fused", "portable"]

_ATTENTION = "GroupQueryAttention"


def find_form(graph: onnx.GraphProto, past: list[str]) -> Form:
    """Raises UnservableModel if layers, or readers of one layer, have different forms."""
    users: dict[str, set[str]] = defaultdict(set)
    for node in graph.node:
        for name in node.input:
            users[name].add(node.op_type)
    for name in past:
        if _ATTENTION in users[name] and (more := sorted(users[name] - {_ATTENTION})):
            raise UnservableModel(
                f"{name} goes to {_ATTENTION}, which appends to it in place, and {', '.join(more)} "
                "reads it, too"
            )
    others = [name for name in past if users[name] != {_ATTENTION}]
    if not others:
        return "fused"
    if any(_ATTENTION in users[name] for name in past):
        raise UnservableModel(
            f"{others[0]} goes to {', '.join(sorted(users[others[0]])) or 'nothing'}, others to "
            f"{_ATTENTION}: layers of both forms cannot share a run"
        )
    return "portable"


def find_short_context(graph: onnx.GraphProto) -> int | None:
    """The builder's longrope: an If chooses the rotary cache of all rows by the longest one."""
    used = {name for n in graph.node if n.op_type == _ATTENTION for name in n.input}
    lengths = [
        value.t.dims[0]
        for choice in graph.node
        if choice.op_type == "If" and used & set(choice.output)
        for branch in choice.attribute
        for node in branch.g.node
        for value in node.attribute
        if len(value.t.dims) == 2
    ]
    return min(lengths, default=None)


def find_windows(graph: onnx.GraphProto) -> frozenset[int]:
    """`local_window_size` of all attention nodes; one that lacks it has no window."""
    return frozenset(
        next((a.i for a in node.attribute if a.name == "local_window_size"), -1)
        for node in graph.node
        if node.op_type == _ATTENTION
    )
