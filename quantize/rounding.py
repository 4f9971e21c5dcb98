"""8-bit rounding with a scale per channel, of matrices and of embedding tables."""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from .tensors import Weights, WeightWriter

LEVELS = 127
_COLUMNS = 4096  # rounded at a time


def round_channels(
    weight: NDArray[np.float32], levels: int = LEVELS
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(in, out) -> whole numbers of that shape from -levels to levels, and scales (out,)."""
    rounded = np.empty(weight.shape, np.int8)
    scales = np.empty(weight.shape[1], np.float32)
    for start in range(0, weight.shape[1], _COLUMNS):
        piece = weight[:, start : start + _COLUMNS]
        scale = np.abs(piece).max(axis=0) / np.float32(levels)
        scale[scale == 0] = 1
        rounded[:, start : start + _COLUMNS] = np.rint(piece / scale)
        scales[start : start + _COLUMNS] = scale
    return rounded, scales


def embed(node: onnx.NodeProto, weights: Weights, writer: WeightWriter) -> list[onnx.NodeProto]:
    """Stands for a Gather of rows of a weight: 8 bits, and one scale per row, looked up beside it.

    8 bits whatever the matrices have: a row is looked up, not multiplied.
    """
    name, output = node.input[0], node.output[0]
    dtype = weights.stored(name).dtype
    rounded, scale = round_channels(weights.read(name).T)
    table = writer.add(f"{name}/rows", rounded.T)
    scales = writer.add(f"{name}/row_scales", scale[:, None].astype(dtype))  # (rows, 1)
    part = {key: f"{output}/{key}" for key in ("rounded", "whole", "scale")}
    to = helper.np_dtype_to_tensor_dtype(dtype)
    return [
        helper.make_node("Gather", [table, node.input[1]], [part["rounded"]], node.name),
        helper.make_node("Cast", [part["rounded"]], [part["whole"]], f"{output}/Cast", to=to),
        helper.make_node("Gather", [scales, node.input[1]], [part["scale"]], part["scale"]),
        helper.make_node("Mul", [part["whole"], part["scale"]], [output], f"{output}/Mul"),
    ]
