"""Weights in 8 or 4 bits, a scale for each block of 32 inputs; activations stay floating point.

With 4 bits the MLP has 4, and attention and LM head, which are small and sensitive, keep 8.

`MatMulNBits` dequantizes in the kernel. On the CPU it rounds activations to 8 bits inside, block by
block (accuracy level 4, the fast path); on CUDA it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from .errors import QuantizeError
from .rewrite import MICROSOFT, is_matrix
from .rounding import embed
from .tensors import Weights, WeightWriter

BLOCK_SIZE = 32
ACCURACY_LEVEL = 4
_COLUMNS = 4096  # quantized at a time
# In the name of a node or of its weight: Phi-2 and OPT have no word for the whole of it.
_MLP = ("mlp", "fc1", "fc2", "feed_forward")


class WeightOnly:
    """A `Method`. `bits` are 8, or 4 for the MLP."""

    operator = "MatMulNBits"

    def __init__(
        self,
        model: onnx.ModelProto,
        weights: Weights,
        *,
        bits: int = 8,
        is_for_cuda: bool = False,
    ) -> None:
        self._weights = weights
        self._bits = bits
        self._is_for_cuda = is_for_cuda
        found = {self._bits_of(node) for node in model.graph.node if is_matrix(node, weights)}
        if found and bits not in found:
            raise QuantizeError(
                f"no matrix gets {bits} bits: the names of this graph's nodes and weights do not "
                f"say which belong to an MLP ({', '.join(_MLP)})"
            )
        self.parameters: dict[str, Any] = {"bits": sorted(found), "block_size": BLOCK_SIZE}
        if not is_for_cuda:
            self.parameters["accuracy_level"] = ACCURACY_LEVEL

    def matrix(self, node: onnx.NodeProto, writer: WeightWriter) -> list[onnx.NodeProto]:
        name, bits = node.input[1], self._bits_of(node)
        num_inputs, num_outputs = self._weights.shape(name)
        # Symmetric where the kernels want it, and where bits abound.
        is_symmetric = bits == 8 or self._is_for_cuda
        dtype = self._weights.stored(name).dtype  # of the scales, too
        blocks = round_blocks(self._weights.read(name), bits, is_symmetric=is_symmetric, to=dtype)
        inputs = [
            node.input[0],
            writer.add(f"{name}/q{bits}", blocks.packed),
            writer.add(f"{name}/scales", blocks.scales),
        ]
        if not is_symmetric:
            inputs.append(writer.add(f"{name}/zero_points", blocks.zero_points))
        attributes: dict[str, Any] = {
            "K": num_inputs,
            "N": num_outputs,
            "bits": bits,
            "block_size": BLOCK_SIZE,
        }
        if not self._is_for_cuda:
            attributes["accuracy_level"] = ACCURACY_LEVEL
        return [
            helper.make_node(
                "MatMulNBits", inputs, node.output, node.name, domain=MICROSOFT, **attributes
            )
        ]

    def _bits_of(self, node: onnx.NodeProto) -> int:
        is_mlp = any(word in name for word in _MLP for name in (node.name, node.input[1]))
        return self._bits if is_mlp else 8

    def embedding(self, node: onnx.NodeProto, writer: WeightWriter) -> list[onnx.NodeProto]:
        return embed(node, self._weights, writer)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix as MatMulNBits has it. The last block is filled up with zeros."""

    packed: NDArray[np.uint8]  # (out, blocks, 32 * bits / 8), the lower half of a byte first
    scales: NDArray[np.floating[Any]]  # (out * blocks,)
    zero_points: NDArray[np.uint8]  # (out * ceil(blocks * bits / 8),)


def round_blocks(
    weight: NDArray[np.float32],
    bits: int,
    *,
    is_symmetric: bool,
    to: np.dtype[Any] = np.dtype(np.float32),  # noqa: B008 (a constant)
) -> Blocks:
    """Rounds a matrix (in, out) to the nearest of `2 ** bits` values of each block, with scales of
    the type `to`."""
    num_inputs, num_outputs = weight.shape
    num_blocks = -(-num_inputs // BLOCK_SIZE)
    packed = np.empty((num_outputs, num_blocks, BLOCK_SIZE * bits // 8), np.uint8)
    scales = np.empty((num_outputs, num_blocks), to)
    zero_points = np.empty((num_outputs, -(-num_blocks * bits // 8)), np.uint8)
    for start in range(0, num_outputs, _COLUMNS):
        columns = weight[:, start : start + _COLUMNS].T
        filled = np.zeros((len(columns), num_blocks * BLOCK_SIZE), np.float32)
        filled[:, :num_inputs] = columns
        blocks = filled.reshape(len(columns), num_blocks, BLOCK_SIZE)
        scale, zero = _scales(blocks, bits, is_symmetric, to)
        top = 2**bits - 1
        numbers = np.clip(np.rint(blocks / scale[..., None]) + zero[..., None], 0, top)
        piece = slice(start, start + len(columns))
        packed[piece] = _pack(numbers.astype(np.uint8), bits)
        scales[piece] = scale
        zero_points[piece] = _pack(zero.astype(np.uint8), bits)
    return Blocks(packed, scales.reshape(-1), zero_points.reshape(-1))


def _scales(
    blocks: NDArray[np.float32], bits: int, is_symmetric: bool, to: np.dtype[Any]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Step and zero point of each block."""
    if is_symmetric:
        middle = np.float32(2 ** (bits - 1))
        scale = (np.abs(blocks).max(axis=2) / (middle - 1)).astype(to).astype(np.float32)
        zero = np.full(scale.shape, middle, np.float32)
    else:
        low = np.minimum(blocks.min(axis=2), 0)
        span = np.maximum(blocks.max(axis=2), 0) - low
        scale = (span / np.float32(2**bits - 1)).astype(to).astype(np.float32)
        zero = np.rint(-low / np.where(scale == 0, 1, scale))
    return np.where(scale == 0, np.float32(1), scale), zero


def _pack(numbers: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Along the last axis, two to a byte for 4 bits; an odd one gets a zero beside it."""
    if bits == 8:
        return numbers
    if numbers.shape[-1] % 2:
        numbers = np.concatenate([numbers, np.zeros_like(numbers[..., :1])], axis=-1)
    packed: NDArray[np.uint8] = numbers[..., 0::2] | (numbers[..., 1::2] << np.uint8(4))
    return packed
