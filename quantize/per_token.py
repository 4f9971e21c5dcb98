"""W8A8: weights and activations in 8 bits, whole numbers multiplied with whole numbers.

A weight has one scale per output channel. An activation has one per token, found when it is there:
the largest magnitude of its row. So a request's numbers never depend on its neighbours', as those
of per-tensor "dynamic" quantization do. Matrices that read the same value share its quantization.

    x --Abs--ReduceMax--> largest          (rows, tokens, 1)
    x / largest --QuantizeLinear--> u8     in steps of 1/127 around 128: unsigned is the fast kind
    u8 x W8 --MatMulIntegerToFloat--> y    y * largest is the answer

What is multiplied by a gate before it is read (`up` of an MLP) keeps its factor until then: the
quantization of the product does not mind it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from .rewrite import MICROSOFT, is_matrix
from .rotation import CannotRotate, rotate
from .rounding import LEVELS, embed, round_channels
from .tensors import Weights, WeightWriter

# With 7 bits no pair of products leaves 16 bits, where CPUs without VNNI add them (and saturate).
REDUCED_LEVELS = 63
_BLOCK = 64  # channels that are mixed where a value cannot be rotated for free
_SMALLEST_BLOCK = 16
_Matrix = NDArray[np.float32]


class PerToken:
    """A `Method`."""

    operator = "MatMulIntegerToFloat"

    def __init__(
        self, graph: onnx.GraphProto, weights: Weights, *, reduce_range: bool = False
    ) -> None:
        self._weights = weights
        self._levels = REDUCED_LEVELS if reduce_range else LEVELS
        self._calm = {
            node.output[0] for node in graph.node if node.op_type == "GroupQueryAttention"
        }
        try:
            self._calm |= rotate(graph, weights)
            rotated = "yes"
        except CannotRotate as error:
            rotated = f"no: {error}"
        self.parameters: dict[str, Any] = {
            "bits": 8,
            "activations": "one scale per token",
            "rotated": rotated,
            "reduce_range": reduce_range,
        }
        self._deferred = _find_deferred(graph, weights)
        self._factors: dict[str, str] = {}  # value -> what its rows are still to be multiplied by
        self._quantized: dict[str, str] = {}  # value -> the factor of its rows once quantized

    def matrix(self, node: onnx.NodeProto, writer: WeightWriter) -> list[onnx.NodeProto]:
        value, name, output = node.input[0], node.input[1], node.output[0]
        nodes = [] if value in self._quantized else self._quantize(value, name, writer)
        weight = self._weights.read(name)
        if value not in self._calm and (block := _block(len(weight))):
            weight = _mix(weight, block)
        rounded, scale = round_channels(weight, self._levels)
        inputs = [
            f"{value}/u8",
            writer.add(f"{name}/s8", rounded),
            writer.add("per_token/one", np.array(1, np.float32)),
            writer.add(f"{name}/scale", scale / LEVELS),
            writer.add("per_token/zero_point", np.array(128, np.uint8)),
        ]
        factor = self._quantized[value]
        if output in self._deferred:
            self._factors[self._deferred[output]] = factor
            product = output
        else:
            product = f"{output}/product"
        nodes.append(
            helper.make_node("MatMulIntegerToFloat", inputs, [product], node.name, domain=MICROSOFT)
        )
        if product != output:
            nodes.append(
                helper.make_node("Mul", [product, factor], [output], f"{node.name}/factor")
            )
        return nodes

    def _quantize(self, value: str, matrix: str, writer: WeightWriter) -> list[onnx.NodeProto]:
        """The nodes that turn `value` into bytes, for all matrices that read it."""
        nodes: list[onnx.NodeProto] = []
        read = value
        width = self._weights.shape(matrix)[0]
        if value not in self._calm and (block := _block(width)):
            read = f"{value}/mixed"
            nodes += _mixing(value, read, width, block, writer)
        axis = writer.add("per_token/axis", np.array([-1], np.int64))
        step = writer.add("per_token/step", np.array(1 / LEVELS, np.float32))
        zero_point = writer.add("per_token/zero_point", np.array(128, np.uint8))
        magnitude, largest, unit = (f"{value}/{part}" for part in ("magnitude", "largest", "unit"))
        nodes += [
            helper.make_node("Abs", [read], [magnitude], f"{value}/Abs"),
            helper.make_node(
                "ReduceMax", [magnitude, axis], [largest], f"{value}/ReduceMax", keepdims=1
            ),
            # A row of zeros gives 0/0: whatever byte a NaN becomes is multiplied by 0 in the end.
            helper.make_node("Div", [read, largest], [unit], f"{value}/Div"),
            helper.make_node(
                "QuantizeLinear",
                [unit, step, zero_point],
                [f"{value}/u8"],
                f"{value}/QuantizeLinear",
            ),
        ]
        self._quantized[value] = largest
        if value in self._factors:
            factor = f"{value}/factor"
            nodes.append(
                helper.make_node("Mul", [largest, self._factors[value]], [factor], f"{factor}/Mul")
            )
            self._quantized[value] = factor
        return nodes

    def embedding(self, node: onnx.NodeProto, writer: WeightWriter) -> list[onnx.NodeProto]:
        return embed(node, self._weights, writer)


def _find_deferred(graph: onnx.GraphProto, weights: Weights) -> dict[str, str]:
    """Outputs of matrices that only go, times a gate, into matrices -> that product."""
    readers = Counter(name for node in graph.node for name in node.input)
    outputs = {value.name for value in graph.output}
    products = {
        name: node.output[0] for node in graph.node if node.op_type == "Mul" for name in node.input
    }
    into_matrices = Counter(node.input[0] for node in graph.node if is_matrix(node, weights))
    deferred: dict[str, str] = {}
    for node in graph.node:
        output = node.output[0]
        product = products.get(output)
        if (
            is_matrix(node, weights)
            and product is not None
            and readers[output] == 1
            and into_matrices[product] == readers[product]
            and not {output, product} & outputs
            and product not in deferred.values()
        ):
            deferred[output] = product
    return deferred


def _block(width: int) -> int:
    """The power of two that a width is mixed in; 0 if it is too odd for that."""
    block = min(_BLOCK, width & -width)
    return block if block >= _SMALLEST_BLOCK else 0


def _mixing(
    value: str, mixed: str, width: int, block: int, writer: WeightWriter
) -> list[onnx.NodeProto]:
    """`value @ diag(H, H, ...)`: an outlier is shared out over its block."""
    hadamard = writer.add(f"per_token/hadamard_{block}", _hadamard(block))
    split = np.array([0, 0, width // block, block], np.int64)
    joined = np.array([0, 0, width], np.int64)
    names = f"per_token/split_{width}", f"per_token/join_{width}"
    blocks, turned = f"{value}/blocks", f"{value}/turned"
    return [
        helper.make_node(
            "Reshape", [value, writer.add(names[0], split)], [blocks], f"{value}/split"
        ),
        helper.make_node("MatMul", [blocks, hadamard], [turned], f"{value}/mix"),
        helper.make_node(
            "Reshape", [turned, writer.add(names[1], joined)], [mixed], f"{value}/join"
        ),
    ]


def _mix(weight: _Matrix, block: int) -> _Matrix:
    """The matrix (in, out) that undoes `_mixing`: a Hadamard matrix is its own inverse."""
    blocks = weight.reshape(-1, block, weight.shape[1])
    mixed: _Matrix = np.matmul(_hadamard(block), blocks).reshape(weight.shape)
    return mixed


def _hadamard(size: int) -> _Matrix:
    """Sylvester's: symmetric, orthogonal, all entries as large; `size` is a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: _Matrix = (matrix / np.sqrt(size)).astype(np.float32)
    return scaled
