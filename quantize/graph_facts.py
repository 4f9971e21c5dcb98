"""What a decoder graph says of itself: form, cache inputs, heads, vocabulary, types.

Read from the graph's inputs, outputs and attention nodes, whatever config.json claims. Here, too:
which inputs and outputs cannot be served, for `check` as for an export that is to be quantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import onnx
from onnx import TensorProto

from .graph_file import all_nodes

_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_ATTENTION = "GroupQueryAttention"
_COS_CACHE_INPUT = 7  # of GroupQueryAttention
_SERVED_INPUTS = {"input_ids", "attention_mask", "position_ids"}
_SERVED_KV_TYPES = ({"float"}, {"float16"})


@dataclass(frozen=True, slots=True)
class Value:
    """An input or output; a dimension without a number is None."""

    name: str
    type: str
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class GraphFacts:
    form: Literal["fused", "portable"]
    inputs: dict[str, Value]
    outputs: dict[str, Value]
    windows: list[int]  # of each layer's attention, -1 for none; empty in the portable form
    cos_cache_length: int | None  # positions that the rotary embedding covers

    @property
    def past(self) -> list[Value]:
        return [value for name, value in self.inputs.items() if _PAST.fullmatch(name)]

    @property
    def num_layers(self) -> int:
        return len(self.past) // 2

    @property
    def kv_dims(self) -> set[tuple[int | None, int | None]]:
        """(KV heads, head size), one pair if all layers agree."""
        return {(v.dims[1], v.dims[3]) for v in self.past if len(v.dims) == 4}

    @property
    def kv_types(self) -> set[str]:
        presents = [v for name, v in self.outputs.items() if name.startswith("present.")]
        return {value.type for value in [*self.past, *presents]}

    @property
    def vocab_size(self) -> int | None:
        logits = self.outputs.get("logits")
        return logits.dims[-1] if logits and logits.dims else None


def graph_facts(model: onnx.ModelProto) -> GraphFacts:
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}  # old graphs list them as inputs too
    attention = [node for node in graph.node if node.op_type == _ATTENTION]
    return GraphFacts(
        form="fused" if attention else "portable",
        inputs={v.name: _value(v) for v in graph.input if v.name not in weights},
        outputs={v.name: _value(v) for v in graph.output},
        windows=_windows(attention),
        cos_cache_length=_cos_cache_length(model, attention),
    )


def form_problems(facts: GraphFacts) -> list[str]:
    """What of its inputs and outputs is not that of a decoder with a KV cache."""
    problems = []
    if missing := {"input_ids", "attention_mask"} - facts.inputs.keys():
        problems.append(f"it lacks the inputs {_listed(missing)}")
    if not facts.past:
        problems.append("it has no past_key_values inputs: exported without a KV cache")
    if unknown := facts.inputs.keys() - _SERVED_INPUTS - {value.name for value in facts.past}:
        problems.append(f"nothing is known to feed its inputs {_listed(unknown)}")
    layers = range(facts.num_layers)
    pasts = {f"past_key_values.{i}.{kind}" for i in layers for kind in ("key", "value")}
    if missing := pasts - facts.inputs.keys():
        problems.append(f"its layers are not 0, 1, 2 …: it lacks {_listed(missing)}")
    wanted = {"logits", *(v.name.replace("past_key_values", "present") for v in facts.past)}
    if missing := wanted - facts.outputs.keys():
        problems.append(f"it lacks the outputs {_listed(missing)}")
    for name in sorted(_SERVED_INPUTS & facts.inputs.keys()):
        if (kind := facts.inputs[name].type) != "int64":
            problems.append(f"{name} has type {kind}; int64 is expected")
    if facts.past and facts.kv_types not in _SERVED_KV_TYPES:
        found = _listed(facts.kv_types)
        problems.append(f"keys and values have type {found}; one of float, float16 is served")
    return problems


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _value(proto: onnx.ValueInfoProto) -> Value:
    tensor = proto.type.tensor_type
    dims = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
    return Value(proto.name, TensorProto.DataType.Name(tensor.elem_type).lower(), dims)


def _windows(attention: list[onnx.NodeProto]) -> list[int]:
    """By layer, which the name of its past keys gives; in the graph's order where it does not."""

    def layer(position: int, node: onnx.NodeProto) -> int:
        found = _PAST.fullmatch(node.input[3]) if len(node.input) > 3 else None
        return int(found[1]) if found else position

    windows = {
        layer(position, node): next(
            (a.i for a in node.attribute if a.name == "local_window_size"), -1
        )
        for position, node in enumerate(attention)
    }
    return [windows[index] for index in sorted(windows)]


def _cos_cache_length(model: onnx.ModelProto, attention: list[onnx.NodeProto]) -> int | None:
    """The longest table of cosines that attention reads, itself or through the branches of an If
    (longrope: one branch for each set of factors)."""
    wanted = {n.input[_COS_CACHE_INPUT] for n in attention if len(n.input) > _COS_CACHE_INPUT}
    tables = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {output: node for node in model.graph.node for output in node.output}
    lengths = [tables[name].dims[0] for name in wanted if name in tables]
    for name in wanted & makers.keys():
        maker = makers[name]
        inner = [g.g for g in maker.attribute if g.HasField("g")]
        constants = [node for graph in inner for node in graph.node if node.op_type == "Constant"]
        found = [a.t.dims for node in constants for a in node.attribute if a.HasField("t")]
        found += [tensor.dims for graph in inner for tensor in graph.initializer]
        found += [tables[i].dims for g in inner for n in g.node for i in n.input if i in tables]
        lengths += [dims[0] for dims in found if len(dims) == 2]
    return max(lengths, default=None)


def operator_names(model: onnx.ModelProto) -> list[tuple[str, str]]:
    """(domain, operator) of every node, those of nested graphs too; "" is ONNX's own domain."""
    return [
        ("" if node.domain == "ai.onnx" else node.domain, node.op_type) for node in all_nodes(model)
    ]
