"""Turns the axes of the hidden state, so that no channel sticks out when it is rounded to 8 bits.

A few channels of a decoder's hidden state are many times as large as the rest, and a scale that
covers them leaves few steps for the others. An RMS norm does not mind a rotation: with its weight
moved into the matrices behind it, `norm(x Q) = norm(x) Q` for orthogonal Q. So every matrix that
writes the hidden state is multiplied by Q and every one that reads it by Q's transpose, once, at
build time; the graph computes the same and costs nothing more (Ashkboos et al., "QuaRot", 2024).

Q is a Hartley matrix behind random signs: it exists for every width, all its entries are small, and
an FFT multiplies by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from .rewrite import names_read
from .tensors import Weights

_NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
_SEED = 0
_COLUMNS = 4096  # rotated at a time
# Between the last norm and the LM head lies the choice of the last token.
_TRANSPARENT = ("GatherND", "Unsqueeze")


class CannotRotate(Exception):
    """The graph's hidden state is not read by RMS norms and written by matrices only."""


@dataclass(slots=True)
class _HiddenState:
    """Who touches the hidden state: names of weights, and of each matrix's norm."""

    embeddings: set[str] = field(default_factory=set)
    norm_of: dict[str, str] = field(default_factory=dict)  # matrix that reads -> norm weight
    writers: set[str] = field(default_factory=set)  # matrices, and the biases behind them


def rotate(graph: onnx.GraphProto, weights: Weights) -> set[str]:
    """Notes the edits in `weights`; the graph itself stays as it is. The values that matrices read
    as rotated.

    Raises CannotRotate, with nothing noted, for a graph that it would change.
    """
    found = _Reader(graph, weights).read()
    widths = {weights.shape(norm)[0] for norm in found.norm_of.values()}
    if len(widths) != 1:
        raise CannotRotate(f"its norms are {sorted(widths)} wide")
    [width] = widths
    signs = np.random.default_rng(_SEED).choice(np.array([-1, 1], np.float32), width)
    for name, norm in found.norm_of.items():
        # Read at once: the norm is edited, too.
        scale = np.array(weights.stored(norm), np.float32)
        weights.edit(name, lambda w, scale=scale: turn(w.T * scale, signs).T)  # type: ignore[misc]
    for norm in set(found.norm_of.values()):
        weights.edit(norm, np.ones_like)
    for name in found.writers | found.embeddings:
        weights.edit(name, lambda w: turn(w, signs))
    return {
        node.input[0] for node in graph.node if node.input[1:2] and node.input[1] in found.norm_of
    }


def turn(matrix: NDArray[np.float32], signs: NDArray[np.float32]) -> NDArray[np.float32]:
    """`matrix @ Q` for a matrix `(..., width)`, where `Q = diag(signs) @ hartley(width)`.

    `hartley(n)[j, k] = (cos t + sin t) / sqrt(n)` with `t = 2 pi j k / n`, which is symmetric and
    its own inverse (Hartley, 1942); its product with a real x is `Re F(x) - Im F(x)`.
    """
    rows = matrix.reshape(-1, matrix.shape[-1])
    turned = np.empty(rows.shape, np.float32)
    for start in range(0, len(rows), _COLUMNS):
        piece = torch.from_numpy(rows[start : start + _COLUMNS] * signs)
        spectrum = torch.fft.fft(piece, norm="ortho")
        turned[start : start + _COLUMNS] = (spectrum.real - spectrum.imag).numpy()
    return turned.reshape(matrix.shape)


class _Reader:
    """Follows the hidden state through the graph, from the embedding to the LM head."""

    def __init__(self, graph: onnx.GraphProto, weights: Weights) -> None:
        self._graph = graph
        self._weights = weights
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in names_read(node):
                self._readers.setdefault(name, []).append(node)
        self._writer = {name: node for node in graph.node for name in node.output}
        self._outputs = {value.name for value in graph.output}
        self._hidden: set[str] = set()
        self._found = _HiddenState()

    def read(self) -> _HiddenState:
        self._start()
        for node in self._graph.node:
            if node.op_type in _NORMS and node.input[0] in self._hidden:
                self._pass_norm(node)
        for value in self._hidden:
            self._check_norms(value, place=0)
        if not self._found.norm_of:
            raise CannotRotate("it has no RMS norms that ONNX Runtime knows as such")
        matrices = [*self._found.norm_of, *self._found.writers, *self._found.embeddings]
        for name in matrices:
            if len(self._readers[name]) != 1:
                raise CannotRotate(f"{name} is used {len(self._readers[name])} times")
        return self._found

    def _start(self) -> None:
        """The embedding: looked up by token ids."""
        for node in self._readers.get("input_ids", []):
            if node.op_type == "Gather" and node.input[0] in self._weights:
                self._found.embeddings.add(node.input[0])
                self._hidden.add(node.output[0])
        if not self._hidden:
            raise CannotRotate("its embedding was not found")

    def _pass_norm(self, node: onnx.NodeProto) -> None:
        is_skip = node.op_type.startswith("Skip")
        if is_skip:
            self._pass_writer(node.input[1])
        if is_skip and len(node.input) > 3 and node.input[3]:
            raise CannotRotate(f"{node.name} adds a bias")
        norm = node.input[2 if is_skip else 1]
        if norm not in self._weights:
            raise CannotRotate(f"{node.name} has no constant weight")
        if is_skip and len(node.output) > 3 and node.output[3]:
            self._hidden.add(node.output[3])
        self._pass_readers(node.output[0], norm)

    def _pass_readers(self, value: str, norm: str) -> None:
        self._check_readers(value, lambda node: self._is_matrix(node) or _is_chosen(node, value))
        for node in self._readers.get(value, []):
            if node.op_type == "MatMul":
                self._found.norm_of[node.input[1]] = norm
            elif node.op_type != "Shape":
                self._pass_readers(node.output[0], norm)

    def _pass_writer(self, value: str) -> None:
        """`value` is added to the hidden state: a matrix's output, with or without a bias."""
        self._check_norms(value, place=1)
        node = self._writer[value]
        if node.op_type == "Add":
            biases = [name for name in node.input if name in self._weights]
            values = [name for name in node.input if name not in self._weights]
            if len(biases) != 1 or len(values) != 1:
                raise CannotRotate(f"{node.name} is no bias")
            self._found.writers.add(biases[0])
            self._check_readers(values[0], lambda reader: reader == node)
            node = self._writer[values[0]]
        if not self._is_matrix(node):
            raise CannotRotate(f"{node.op_type} writes the hidden state")
        self._found.writers.add(node.input[1])

    def _is_matrix(self, node: onnx.NodeProto) -> bool:
        return node.op_type == "MatMul" and node.input[1] in self._weights

    def _check_norms(self, value: str, place: int) -> None:
        """Norms alone read it: the hidden state as their first input, what is added to it as their
        second."""
        self._check_readers(
            value, lambda node: node.op_type in _NORMS and node.input[place] == value
        )

    def _check_readers(self, value: str, is_known: Callable[[onnx.NodeProto], bool]) -> None:
        if value in self._outputs:
            raise CannotRotate(f"{value} is an output")
        for node in self._readers.get(value, []):
            if not is_known(node):
                raise CannotRotate(f"{node.op_type} reads the hidden state")


def _is_chosen(node: onnx.NodeProto, value: str) -> bool:
    return node.op_type == "Shape" or (node.op_type in _TRANSPARENT and node.input[0] == value)
