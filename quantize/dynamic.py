"""int8 as ONNX Runtime's `quantize_dynamic` makes it: one activation scale for all rows of a step.

Here for comparison, and by name only: a row's numbers depend on its neighbours', and one token with
large activations takes the steps away from all others.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

from .rewrite import MICROSOFT
from .rounding import embed, round_channels
from .tensors import Weights, WeightWriter


class Dynamic:
    """A `Method`."""

    operator = "DynamicQuantizeMatMul"

    def __init__(self, model: onnx.ModelProto, weights: Weights) -> None:
        self.parameters: dict[str, Any] = {"bits": 8, "activations": "one scale per step"}
        self._weights = weights

    def matrix(self, node: onnx.NodeProto, writer: WeightWriter) -> list[onnx.NodeProto]:
        name = node.input[1]
        rounded, scale = round_channels(self._weights.read(name))
        inputs = [
            node.input[0],
            writer.add(f"{name}/s8", rounded),
            writer.add(f"{name}/scale", scale),
        ]
        return [
            helper.make_node(
                "DynamicQuantizeMatMul", inputs, node.output, node.name, domain=MICROSOFT
            )
        ]

    def embedding(self, node: onnx.NodeProto, writer: WeightWriter) -> list[onnx.NodeProto]:
        return embed(node, self._weights, writer)
