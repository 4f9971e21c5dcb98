"""Graphs of a few nodes around constant matrices, and what ONNX Runtime makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quantize import MODEL_FILE
from quantize.graph_file import load_graph
from quantize.tensors import Weights

Float = NDArray[np.float32]


def write_graph(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, Float],
    *,
    axes: int = 3,
    opset: int = 18,
) -> Path:
    """A graph from `x` to `y`, both of so many axes and of any size."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * axes) for n in "xy")
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "graph", [x], [y], tensors)
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    (folder / MODEL_FILE).write_bytes(model.SerializeToString())
    return folder


def product(weight: str, x: str = "x", y: str = "y") -> onnx.NodeProto:
    return helper.make_node("MatMul", [x, weight], [y], f"/{weight}")


def answer(folder: Path, x: Float) -> Float:
    session = ort.InferenceSession(folder / MODEL_FILE, providers=["CPUExecutionProvider"])
    y: Float = session.run(["y"], {"x": x})[0]
    return y


def nodes_of(folder: Path, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in load_graph(folder / MODEL_FILE).graph.node if node.op_type == op_type]


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def weights_of(folder: Path) -> dict[str, NDArray[Any]]:
    """Every weight as it is stored."""
    model = load_graph(folder / MODEL_FILE)
    weights = Weights(model, folder)
    return {
        tensor.name: np.array(weights.stored(tensor.name)) for tensor in model.graph.initializer
    }


def draw(*shape: int, seed: int = 3) -> Float:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
