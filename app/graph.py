"""The decoder graph as its protobuf tells it: its inputs and outputs, what it stores per token.

Reads no weights and opens no session, so a folder that cannot be served correctly is refused
within a second, with everything that is wrong in one report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx

from .attention import Form, find_form, find_short_context, find_windows
from .errors import UnservableModel
from .external_data import find_data_problems
from .folder import Claims, IoNames, find_graph, read_claims, read_io_names

_Shape = list[int | str]

_FLOATS = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.FLOAT16: "float16"}


@dataclass(frozen=True, slots=True)
class Graph:
    """What the graph itself says, whatever config.json claims."""

    path: Path
    form: Form
    input_ids: str
    attention_mask: str
    position_ids: str | None
    logits: str
    past: tuple[str, ...]  # keys of layer 0, its values, keys of layer 1, ...
    present: tuple[str, ...]  # likewise
    num_kv_heads: int
    head_dim: int
    kv_type: str  # "float32" or "float16"
    logits_type: str
    vocab_size: int
    has_last_logits_only: bool
    short_context: int | None  # tokens up to which it takes its short rotary factors (longrope)
    windows: frozenset[int]  # how far back attention looks, -1 for all; empty if portable

    @property
    def num_layers(self) -> int:
        return len(self.past) // 2


def read_graph(folder: Path) -> Graph:
    """Raises UnservableModel with all that keeps the folder from being served correctly."""
    path = find_graph(folder)
    model = _parse(path)
    reader = _Reader(model.graph, read_io_names(folder))
    graph = reader.read(path)
    problems = find_data_problems(model, folder) + reader.problems
    if graph is not None:
        problems += [p for claims in read_claims(folder) for p in _disagreements(graph, claims)]
    if graph is None or problems:
        listed = "".join(f"\n- {problem}" for problem in problems)
        raise UnservableModel(f"{path} cannot be served:{listed}")
    return graph


def _parse(path: Path) -> onnx.ModelProto:
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise UnservableModel(f"{path} is a Git LFS pointer, not the graph: run 'git lfs pull'")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's, whose module has no types
        size = path.stat().st_size
        raise UnservableModel(
            f"{path} is not an ONNX graph, or cut short ({size:,} bytes): {error}"
        ) from error
    if not model.graph.node:
        raise UnservableModel(f"{path} holds no graph ({path.stat().st_size:,} bytes)")
    return model


class _Reader:
    """Reads one graph; what is wrong with it is in `problems` afterwards."""

    def __init__(self, graph: onnx.GraphProto, names: IoNames) -> None:
        self.problems: list[str] = []
        self._graph = graph
        self._names = names
        weights = {tensor.name for tensor in graph.initializer}  # old exporters list them as inputs
        self._inputs = {v.name: v for v in graph.input if v.name not in weights}
        self._outputs = {v.name: v for v in graph.output}

    def read(self, path: Path) -> Graph | None:
        """None if the graph lacks what every decoder has."""
        names = self._names
        for name in (names.input_ids, names.attention_mask):
            self._check_tokens(name)
        if names.logits not in self._outputs:
            self.problems.append(f"it has no output {names.logits!r}")
        past = self._numbered(names.past_key, names.past_value, self._inputs)
        present = self._numbered(names.present_key, names.present_value, self._outputs)
        if not past:
            self.problems.append(
                f"it has no inputs like {names.past_key % 0!r}: it was exported without a KV cache "
                "(optimum's task is text-generation-with-past)"
            )
        elif len(past) != len(present):
            self.problems.append(f"{len(past)} cache inputs, but {len(present)} cache outputs")
        has_positions = names.position_ids in self._inputs
        if has_positions:
            self._check_tokens(names.position_ids)
        self._refuse_unknown(past)
        self._check_cache([*past, *present])
        logits = self._logits()
        if self.problems or logits is None:
            return None
        try:
            form = find_form(self._graph, past)
        except UnservableModel as error:
            self.problems.append(str(error))
            return None
        key = self._inputs[past[0]]
        _, num_kv_heads, _, head_dim = _shape(key)
        return Graph(
            path=path,
            form=form,
            input_ids=names.input_ids,
            attention_mask=names.attention_mask,
            position_ids=names.position_ids if has_positions else None,
            logits=names.logits,
            past=tuple(past),
            present=tuple(present),
            num_kv_heads=int(num_kv_heads),
            head_dim=int(head_dim),
            kv_type=_FLOATS[key.type.tensor_type.elem_type],
            logits_type=_FLOATS[self._outputs[names.logits].type.tensor_type.elem_type],
            vocab_size=int(logits[2]),
            has_last_logits_only=logits[1] == 1,
            short_context=find_short_context(self._graph),
            windows=find_windows(self._graph),
        )

    def _check_tokens(self, name: str) -> None:
        """Ids, mask and positions: any number of rows and of tokens, as int64."""
        if name not in self._inputs:
            self.problems.append(f"it has no input {name!r}")
            return
        value = self._inputs[name]
        if value.type.tensor_type.elem_type != onnx.TensorProto.INT64:
            self.problems.append(f"{name} is of type {_type_name(value)}; int64 is served")
        shape = _shape(value)
        if len(shape) != 2 or any(isinstance(dim, int) for dim in shape):
            self.problems.append(
                f"{name} has the shape {shape}; (rows, tokens) of any size is served"
            )

    def _numbered(self, key: str, value: str, found: Iterable[str]) -> list[str]:
        """Names of layer 0, 1, ... as far as both are there."""
        names: list[str] = []
        while {key % (layer := len(names) // 2), value % layer} <= set(found):
            names += [key % layer, value % layer]
        return names

    def _refuse_unknown(self, past: list[str]) -> None:
        names = self._names
        known = {names.input_ids, names.attention_mask, names.position_ids, *past}
        unknown = [name for name in self._inputs if name not in known]
        if "use_cache_branch" in unknown:
            self.problems.append(
                "it is a merged decoder (use_cache_branch): export it anew, as one graph with past"
            )
        elif unknown:
            shown = ", ".join(unknown[:6]) + (", ..." if len(unknown) > 6 else "")
            self.problems.append(f"it takes inputs that the server does not know: {shown}")

    def _check_cache(self, names: list[str]) -> None:
        """All keys and values `(rows, kv_heads, tokens, head_dim)`, of one size and type."""
        values = [self._inputs.get(name) or self._outputs[name] for name in names]
        kinds: dict[str, list[str]] = defaultdict(list)
        for value in values:
            shape, type_ = _shape(value), value.type.tensor_type.elem_type
            fixed = [isinstance(dim, int) for dim in shape]
            if fixed != [False, True, False, True]:
                self.problems.append(
                    f"{value.name} has the shape {shape}; a cache of (rows, kv_heads, tokens, "
                    "head_dim) with any number of rows and tokens is served"
                )
                return
            if type_ not in _FLOATS:
                self.problems.append(
                    f"{value.name} is of type {_type_name(value)}; float or float16 is served"
                )
                return
            kinds[f"{_FLOATS[type_]} (rows, {shape[1]}, tokens, {shape[3]})"].append(value.name)
        if len(kinds) > 1:
            told = ", ".join(f"{names[0]} {kind}" for kind, names in kinds.items())
            self.problems.append(f"its layers store different things: {told}")

    def _logits(self) -> _Shape | None:
        value = self._outputs.get(self._names.logits)
        if value is None:
            return None
        shape = _shape(value)
        if len(shape) != 3 or not isinstance(shape[2], int):
            self.problems.append(f"its logits have the shape {shape}, not (rows, tokens, vocab)")
        elif isinstance(shape[1], int) and shape[1] != 1:
            self.problems.append(f"its logits are fixed to {shape[1]} tokens")
        if value.type.tensor_type.elem_type not in _FLOATS:
            self.problems.append(
                f"its logits are of type {_type_name(value)}; float or float16 is served"
            )
        return shape


def _disagreements(graph: Graph, claims: Claims) -> list[str]:
    """What a file claims and the graph does not bear out: they do not belong together."""
    head_dim = claims.head_dim
    if head_dim is None and claims.hidden_size and claims.num_heads:
        head_dim = claims.hidden_size // claims.num_heads
    return [
        f"{claims.file} says {claimed} {what}, the graph has {found}"
        for what, claimed, found in (
            ("layers", claims.num_layers, graph.num_layers),
            ("KV heads", claims.num_kv_heads, graph.num_kv_heads),
            ("as the width of a head", head_dim, graph.head_dim),
            ("as the vocabulary's size", claims.vocab_size, graph.vocab_size),
        )
        if claimed is not None and claimed != found
    ]


def _shape(value: onnx.ValueInfoProto) -> _Shape:
    dims = value.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims]


def _type_name(value: onnx.ValueInfoProto) -> str:
    return str(onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)).lower()
