"""W8A8: weights and activations in 8 bits, whole numbers multiplied with whole numbers.

A weight has one scale per output channel. An activation has one per token, found when it is there:
the largest magnitude of its row. So a request's numbers never depend on its neighbours', as those
of per-tensor "dynamic" quantization do. Matrices that read the same value share its quantization.

    x --Abs--ReduceMax--> largest          (rows, tokens, 1)
    x / largest --QuantizeLinear--> u8     in steps of 1/127 around 128: unsigned is the fast kind
    u8 x W8 --MatMulIntegerToFloat--> y    y * largest is the answer

What is multiplied by a gate before it is read (`up` of an MLP) keeps its factor until then: the
quantization of the product does not mind it.

What an MLP's matrices read, if it is rotated, needs no scale of its own: behind an RMS norm every
token is as large as any other, and the rotation spreads it like a normal distribution. Four
deviations hold it; the few values beyond are cut there.

    x --QuantizeLinear--> u8               in steps of 4/127
    u8 x W8 --MatMulIntegerToFloat--> y    the answer

The queries', keys' and values' matrices would lose more by that than it is worth.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from .rewrite import MICROSOFT, is_matrix, names_read
from .rotation import CannotRotate, rotate
from .rounding import LEVELS, embed, round_channels
from .tensors import Weights, WeightWriter

# With 7 bits no pair of products leaves 16 bits, where CPUs without VNNI add them (and saturate).
REDUCED_LEVELS = 63
_ONNX = ("", "ai.onnx")  # names of the standard's own domain
_BLOCK = 64  # channels that are mixed where a value cannot be rotated for free
_SMALLEST_BLOCK = 16
_RANGE = 4  # standard deviations: wider is coarser, narrower cuts more
_Matrix = NDArray[np.float32]


class PerToken:
    """A `Method`."""

    operator = "MatMulIntegerToFloat"

    def __init__(
        self, model: onnx.ModelProto, weights: Weights, *, reduce_range: bool = False
    ) -> None:
        graph = model.graph
        self._weights = weights
        self._levels = REDUCED_LEVELS if reduce_range else LEVELS
        self._opset = next((o.version for o in model.opset_import if o.domain in _ONNX), 0)
        attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
        self._is_fused = bool(attention)
        # Values that are quantized as they are: rotated ones, and what attention has averaged.
        self._calm = {node.output[0] for node in attention}
        even: set[str] = set()
        try:
            even = rotate(graph, weights)
            rotated = "yes"
        except CannotRotate as error:
            rotated = f"no: {error}"
        self._calm |= even
        self._deferred = _find_deferred(graph, weights)
        # Values that have one range for all tokens.
        self._even = even & {n.input[0] for n in graph.node if {*n.output} & {*self._deferred}}
        self.parameters: dict[str, Any] = {
            "bits": 8,
            "activations": "one scale per token",
            "values_in_one_range": len(self._even),
            "rotated": rotated,
            "reduce_range": reduce_range,
        }
        self._factors: dict[str, str] = {}  # value -> what its rows are still to be multiplied by
        # Value, once quantized -> the factor of its rows; None for an even one.
        self._quantized: dict[str, str | None] = {}

    def matrix(self, node: onnx.NodeProto, writer: WeightWriter) -> list[onnx.NodeProto]:
        value, name, output = node.input[0], node.input[1], node.output[0]
        nodes = [] if value in self._quantized else self._quantize(value, name, writer)
        rounded, scale = self._write_weight(value, name, writer)
        factor = self._quantized[value]
        unit, size = ("range", _RANGE) if factor is None else ("one", 1)
        largest = writer.add(f"per_token/{unit}", np.array(size, np.float32))
        inputs = [f"{value}/u8", rounded, largest, scale, _zero_point(writer)]
        is_deferred = output in self._deferred
        product = output if factor is None or is_deferred else f"{output}/product"
        nodes.append(
            helper.make_node("MatMulIntegerToFloat", inputs, [product], node.name, domain=MICROSOFT)
        )
        if factor is not None and is_deferred:
            self._factors[self._deferred[output]] = factor
        elif factor is not None:
            nodes.append(helper.make_node("Mul", [product, factor], [output], f"{output}/factor"))
        return nodes

    def _write_weight(self, value: str, name: str, writer: WeightWriter) -> tuple[str, str]:
        """The matrix in 8 bits and the scales of its channels, as `value` is quantized."""
        weight = self._weights.read(name)
        prefix = name
        if block := self._block(value, len(weight)):
            weight, prefix = _mix(weight, block), f"{name}/mixed"
        rounded, scale = round_channels(weight, self._levels)
        return (
            writer.add(f"{prefix}/s8", rounded),
            writer.add(f"{prefix}/scale", scale / LEVELS),
        )

    def _block(self, value: str, width: int) -> int:
        """The power of two that the channels of `value` are mixed in; 0 if they are not."""
        block = min(_BLOCK, width & -width)
        return 0 if value in self._calm or block < _SMALLEST_BLOCK else block

    def _quantize(self, value: str, matrix: str, writer: WeightWriter) -> list[onnx.NodeProto]:
        """The nodes that turn `value` into bytes, for all matrices that read it."""
        if value in self._even:
            self._quantized[value] = None
            wide = writer.add("per_token/wide_step", np.array(_RANGE / LEVELS, np.float32))
            return [_to_bytes(value, value, wide, writer)]
        width = self._weights.shape(matrix)[0]
        read, nodes = value, []
        if block := self._block(value, width):
            read = f"{value}/mixed"
            nodes = self._mix_value(value, read, width, block, writer)
        step = writer.add("per_token/step", np.array(1 / LEVELS, np.float32))
        magnitude, largest, unit = (f"{value}/{part}" for part in ("magnitude", "largest", "unit"))
        nodes += [
            helper.make_node("Abs", [read], [magnitude], f"{value}/Abs"),
            self._largest(magnitude, largest, writer),
            # A row of zeros gives 0/0: whatever byte a NaN becomes is multiplied by 0 in the end.
            helper.make_node("Div", [read, largest], [unit], f"{value}/Div"),
            _to_bytes(value, unit, step, writer),
        ]
        factor = largest
        if value in self._factors:
            factor = f"{value}/factor"
            nodes.append(helper.make_node("Mul", [largest, self._factors[value]], [factor], factor))
        self._quantized[value] = factor
        return nodes

    def _mix_value(
        self, value: str, mixed: str, width: int, block: int, writer: WeightWriter
    ) -> list[onnx.NodeProto]:
        """`value @ diag(H, H, ...)`: an outlier is shared out over its block."""
        blocks, turned, shape = (f"{value}/{part}" for part in ("blocks", "turned", "shape"))
        nodes = []
        if self._is_fused:  # (rows, tokens, width)
            leading = [0, 0]
            shape = writer.add(f"per_token/join_{width}", np.array([0, 0, width], np.int64))
        else:  # GPT-2 joins rows and tokens
            leading = [-1]
            nodes = [helper.make_node("Shape", [value], [shape], shape)]
        sizes = np.array([*leading, width // block, block], np.int64)
        split = writer.add(f"per_token/split_{width}", sizes)
        hadamard = writer.add(f"per_token/hadamard_{block}", _hadamard(block))
        return [
            *nodes,
            helper.make_node("Reshape", [value, split], [blocks], f"{value}/split"),
            helper.make_node("MatMul", [blocks, hadamard], [turned], f"{value}/mix"),
            helper.make_node("Reshape", [turned, shape], [mixed], f"{value}/join"),
        ]

    def _largest(self, magnitude: str, largest: str, writer: WeightWriter) -> onnx.NodeProto:
        """Of each row; since opset 18 the axes are an input."""
        if self._opset < 18:
            return helper.make_node("ReduceMax", [magnitude], [largest], largest, axes=[-1])
        axes = writer.add("per_token/axis", np.array([-1], np.int64))
        return helper.make_node("ReduceMax", [magnitude, axes], [largest], largest)

    def embedding(self, node: onnx.NodeProto, writer: WeightWriter) -> list[onnx.NodeProto]:
        return embed(node, self._weights, writer)


def _find_deferred(graph: onnx.GraphProto, weights: Weights) -> dict[str, str]:
    """Outputs of matrices that only go, times a gate, into matrices -> that product."""
    readers = Counter(name for node in graph.node for name in node.input)
    readers.update(name for node in graph.node for name in names_read(node) - {*node.input})
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


def _to_bytes(value: str, read: str, step: str, writer: WeightWriter) -> onnx.NodeProto:
    inputs = [read, step, _zero_point(writer)]
    name = f"{value}/QuantizeLinear"
    return helper.make_node("QuantizeLinear", inputs, [f"{value}/u8"], name)


def _zero_point(writer: WeightWriter) -> str:
    return writer.add("per_token/zero_point", np.array(128, np.uint8))


def _mix(weight: _Matrix, block: int) -> _Matrix:
    """The matrix (in, out) that undoes `_mix_value`: a Hadamard matrix is its own inverse."""
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
