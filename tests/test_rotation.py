"""A rotated graph computes what it computed before; one that it would change is left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper

from quantize import MODEL_FILE
from quantize.compare import compare
from quantize.decoding import Decoding
from quantize.floor import INT8_FLOOR
from quantize.graph_file import load_graph
from quantize.per_token import PerToken
from quantize.rewrite import rewrite
from quantize.rotation import CannotRotate, rotate, turn
from quantize.tensors import Weights, WeightWriter

from .conftest import Named, TinyModel
from .matrices import nodes_of, weights_of

IDS = np.random.default_rng(5).integers(0, 331, (3, 20))
NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
WIDTHS = [1, 2, 7, 8, 30, 64, 97]


class Rotated:
    """A `Method` that rotates and rounds nothing."""

    operator = "MatMul"

    def __init__(self, model: onnx.ModelProto, weights: Weights) -> None:
        self.parameters = {"rotated": rotate(model.graph, weights)}

    def matrix(self, node: onnx.NodeProto, writer: WeightWriter) -> list[onnx.NodeProto]:
        return [node]

    embedding = matrix


def signs_of(width: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).choice(np.array([-1, 1], np.float32), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_turning_is_a_hartley_matrix_behind_signs(width: int) -> None:
    signs = signs_of(width)
    angles = 2 * np.pi * np.outer(np.arange(width), np.arange(width)) / width
    hartley = (np.cos(angles) + np.sin(angles)) / np.sqrt(width)
    found = turn(np.eye(width, dtype=np.float32), signs)
    np.testing.assert_allclose(found, signs[:, None] * hartley, atol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_turning_keeps_lengths_and_angles(width: int) -> None:
    q = turn(np.eye(width, dtype=np.float32), signs_of(width))
    np.testing.assert_allclose(q @ q.T, np.eye(width), atol=1e-5)


def test_many_rows_are_turned_as_one_is() -> None:
    """More than are turned at a time."""
    rows = np.random.default_rng(2).standard_normal((5000, 6)).astype(np.float32)
    turned = turn(rows, signs_of(6))
    for row in (0, 4095, 4096, 4999):
        np.testing.assert_allclose(turned[row], turn(rows[row], signs_of(6)), atol=1e-6)


def first_logits(folder: Path) -> NDArray[np.float32]:
    return Decoding(folder, 1, 20).feed(IDS[:1]).copy()


@pytest.mark.parametrize("name", ["phi3-4k", "llama", "llama-biases", "qwen2", "mistral", "qwen3"])
def test_rotated_graph_gives_the_same_logits(
    name: str, family_graph: Named, tmp_path: Path
) -> None:
    """The norms of these models are not ones, and some of them have biases."""
    plain = family_graph(name)
    assert rewrite(plain, tmp_path, Rotated)["rotated"]
    np.testing.assert_allclose(first_logits(tmp_path), first_logits(plain), atol=2e-4)
    plain_weights, weights = weights_of(plain), weights_of(tmp_path)
    norms = {node.input[2 if "Skip" in node.op_type else 1] for node in hidden_norms(tmp_path)}
    assert len(norms) == 5  # two of each layer, and the last
    for norm in norms:
        assert not np.all(plain_weights[norm] == 1)
        assert np.all(weights[norm] == 1)
    moved = [key for key in weights if "MatMul.weight" in key or "embed" in key]
    assert all(not np.allclose(weights[key], plain_weights[key], atol=1e-2) for key in moved)


def hidden_norms(folder: Path) -> list[onnx.NodeProto]:
    """Not Qwen3's norms of queries and keys."""
    return [n for op in NORMS for n in nodes_of(folder, op) if not re.search("[qk]_norm", n.name)]


@pytest.mark.parametrize("name", ["gemma2", "granite", "gpt_neox"])
def test_graph_that_cannot_be_rotated_is_quantized_well_all_the_same(
    name: str, family_graph: Named, tmp_path: Path
) -> None:
    """Norms behind the matrices; multipliers; norms with a mean, of single operators."""
    plain = family_graph(name)
    model = load_graph(plain / MODEL_FILE)
    weights = Weights(model, plain)
    with pytest.raises(CannotRotate):
        rotate(model.graph, weights)
    assert not any(weights.is_edited(tensor.name) for tensor in model.graph.initializer)
    done = rewrite(plain, tmp_path, PerToken)
    assert done["rotated"].startswith("no: ")
    assert INT8_FLOOR.shortfalls(compare(plain, tmp_path, IDS)) == []


def read_by_another(graph: onnx.GraphProto) -> None:
    [first] = [node for node in graph.node if node.op_type == NORMS[0]]
    graph.node.append(helper.make_node("Abs", [first.input[0]], ["abs"]))


def swap_inputs(graph: onnx.GraphProto) -> None:
    skip = next(node for node in graph.node if node.op_type == NORMS[1])
    skip.input[0], skip.input[1] = skip.input[1], skip.input[0]


def share_a_matrix(graph: onnx.GraphProto) -> None:
    up, gate = (
        next(node for node in graph.node if word in node.name) for word in ("up_proj", "gate_proj")
    )
    up.input[1] = gate.input[1]


def publish_the_hidden_state(graph: onnx.GraphProto) -> None:
    [first] = [node for node in graph.node if node.op_type == NORMS[0]]
    graph.output.append(onnx.ValueInfoProto(name=first.input[0]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (read_by_another, "Abs reads the hidden state"),
        (swap_inputs, "SkipSimplifiedLayerNormalization reads the hidden state"),
        (share_a_matrix, "is used 2 times"),
        (publish_the_hidden_state, "is an output"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_hidden_state_that_something_else_touches_is_not_rotated(
    change: Callable[[onnx.GraphProto], None], says: str, tiny_llama: TinyModel
) -> None:
    model = load_graph(tiny_llama.folder / MODEL_FILE)
    change(model.graph)
    with pytest.raises(CannotRotate, match=says):
        rotate(model.graph, Weights(model, tiny_llama.folder))


def test_what_an_mlp_reads_is_cut_at_four_deviations_and_has_no_scale(
    tiny_llama: TinyModel, tmp_path: Path
) -> None:
    rewrite(tiny_llama.folder, tmp_path, PerToken)
    even = {
        node.input[0]: node.input[1]
        for node in nodes_of(tmp_path, "QuantizeLinear")
        if node.input[0].endswith("/post_attention_layernorm/output_0")
    }
    assert len(even) == 2  # layers
    assert {*even.values()} == {"per_token/wide_step"}
    assert weights_of(tmp_path)["per_token/wide_step"] == np.float32(4 / 127)
    for node in nodes_of(tmp_path, "MatMulIntegerToFloat"):
        word = "range" if re.search("gate_proj|up_proj", node.name) else "one"
        assert node.input[2] == f"per_token/{word}"
    assert INT8_FLOOR.shortfalls(compare(tiny_llama.folder, tmp_path, IDS)) == []


def test_norms_that_are_not_rotated_keep_a_scale_per_token(
    family_graph: Named, tmp_path: Path
) -> None:
    rewrite(family_graph("gemma2"), tmp_path, PerToken)
    assert all(node.input[1] == "per_token/step" for node in nodes_of(tmp_path, "QuantizeLinear"))
