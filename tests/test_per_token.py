"""W8A8 with a scale per token: its numbers, its nodes, and that no row hears of another."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from quantize import MODEL_FILE
from quantize.decoding import Decoding
from quantize.dynamic import Dynamic
from quantize.external_data import external_tensors
from quantize.per_token import PerToken
from quantize.rewrite import rewrite

from .conftest import Build, TinyModel
from .edits import edit_graph
from .matrices import (
    Float,
    answer,
    draw,
    nodes_of,
    product,
    weights_of,
    write_graph,
)

REDUCED = functools.partial(PerToken, reduce_range=True)


def quantized(
    root: Path,
    nodes: list[onnx.NodeProto],
    weights: dict[str, Float],
    method: Any = PerToken,
    **options: int,
) -> Path:
    write_graph(root / "plain", nodes, weights, **options)
    (root / "quantized").mkdir()
    rewrite(root / "plain", root / "quantized", method)
    return root / "quantized"


def by_hand(x: Float, weight: Float, levels: int = 127) -> NDArray[np.float64]:
    """As the docstring of per_token.py has it."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    steps = np.rint(x / largest / np.float32(1 / 127)).astype(np.int64)
    scale = np.abs(weight).max(axis=0) / np.float32(levels)
    whole = np.rint(weight / scale).astype(np.int64)
    return (steps @ whole) * (scale.astype(np.float64) / 127) * largest


def blocks_of(width: int, size: int) -> Float:
    """Hadamard matrices along the diagonal."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix) / np.sqrt(2)
    return np.kron(np.eye(width // size), matrix).astype(np.float32)


@pytest.mark.parametrize("width", [50, 67, 72])
def test_numbers_are_those_of_the_rounding_by_hand(width: int, tmp_path: Path) -> None:
    """Too odd to be mixed."""
    weight, x = draw(width, 101), draw(3, 5, width, seed=4)
    folder = quantized(tmp_path, [product("w")], {"w": weight})
    np.testing.assert_allclose(answer(folder, x), by_hand(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("width", "block"), [(48, 16), (96, 32), (128, 64), (192, 64)])
def test_value_that_cannot_be_rotated_is_mixed_in_blocks(
    width: int, block: int, tmp_path: Path
) -> None:
    """An outlier leaves the other channels their steps."""
    weight, x = draw(width, 101), draw(2, 3, width, seed=4)
    x[..., 5] = 60
    folder = quantized(tmp_path, [product("w")], {"w": weight})
    mixing = blocks_of(width, block)
    np.testing.assert_allclose(mixing @ mixing, np.eye(width), atol=1e-6)
    expected = by_hand(x @ mixing, mixing @ weight)
    error = np.abs(answer(folder, x) - x @ weight).max()
    np.testing.assert_allclose(answer(folder, x), expected, atol=0.5)  # a step, here and there
    assert error < np.abs(by_hand(x, weight) - x @ weight).max() / 2


@pytest.mark.parametrize("width", [50, 64])
def test_row_of_zeros_gives_zeros(width: int, tmp_path: Path) -> None:
    x = draw(1, 4, width)
    x[0, 2] = 0
    found = answer(quantized(tmp_path, [product("w")], {"w": draw(width, 101)}), x)
    assert np.all(found[0, 2] == 0)
    assert np.all(np.isfinite(found))
    assert np.all(np.abs(found[0, [0, 1, 3]]).max(axis=-1) > 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("width", [50, 64])
def test_row_that_is_not_finite_does_not_become_finite(
    value: float, width: int, tmp_path: Path
) -> None:
    """Its request must fail (FR13), and no other."""
    x = draw(1, 3, width)
    x[0, 1] = value
    found = answer(quantized(tmp_path, [product("w")], {"w": draw(width, 101)}), x)
    assert not np.any(np.isfinite(found[0, 1]))
    assert np.all(np.isfinite(found[0, [0, 2]]))


@pytest.mark.parametrize(
    ("method", "is_independent"), [(PerToken, True), (Dynamic, False)], ids=["per token", "dynamic"]
)
def test_row_hears_of_its_neighbours_with_one_scale_for_all_only(
    method: Any, is_independent: bool, tiny_llama: TinyModel, tmp_path: Path
) -> None:
    rewrite(tiny_llama.folder, tmp_path, method)
    ids = np.random.default_rng(5).integers(0, 260, (2, 20))
    others = ids.copy()
    others[1] = np.random.default_rng(6).integers(0, 260, 20)
    first, second = (Decoding(tmp_path, 2, 20).feed(rows).copy() for rows in (ids, others))
    assert np.array_equal(first[0], second[0]) is is_independent
    assert not np.array_equal(first[1], second[1])


def mlp(folder: Path, **options: Any) -> Path:
    nodes = [
        product("gate_proj", y="gate"),
        product("up_proj", y="up"),
        helper.make_node("Relu", ["gate"], ["act"]),
        helper.make_node("Mul", ["act", "up"], ["gated"]),
        product("down_proj", x="gated"),
    ]
    weights = {"gate_proj": draw(50, 96), "up_proj": draw(50, 96, seed=4)}
    return quantized(folder, nodes, weights | {"down_proj": draw(96, 50, seed=5)}, **options)


def test_factor_of_what_is_gated_is_kept_until_then(tmp_path: Path) -> None:
    """Rows of any size come out right, though `up` is not multiplied by their factor."""
    folder = mlp(tmp_path)
    x = draw(1, 4, 50, seed=6) * np.array([1e-3, 1, 30, 1e3], np.float32)[:, None]
    expected, found = answer(tmp_path / "plain", x)[0], answer(folder, x)[0]
    size = np.abs(expected).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(found / size, expected / size, atol=0.05)
    factors = [node.output[0] for node in nodes_of(folder, "Mul")]
    assert factors == ["gate", "gated", "gated/factor", "y"]


def test_what_others_read_as_well_gets_its_factor_at_once(tmp_path: Path) -> None:
    nodes = [
        product("up_proj", y="up"),
        helper.make_node("Mul", ["x", "up"], ["gated"]),
        product("down_proj", x="gated", y="down"),
        helper.make_node("Add", ["down", "up"], ["y"]),
    ]
    weights = {"up_proj": draw(96, 96), "down_proj": draw(96, 96, seed=4)}
    folder = quantized(tmp_path, nodes, weights)
    assert "up" in [node.output[0] for node in nodes_of(folder, "Mul")]
    x = 30 * draw(1, 2, 96, seed=5)
    expected = answer(tmp_path / "plain", x)
    np.testing.assert_allclose(answer(folder, x), expected, atol=0.03 * np.abs(expected).max())


def test_matrices_that_read_one_value_share_its_quantization(tmp_path: Path) -> None:
    folder = mlp(tmp_path)
    assert [node.input[0] for node in nodes_of(folder, "QuantizeLinear")] == [
        "x/unit",
        "gated/unit",
    ]
    read = [node.input[0] for node in nodes_of(folder, "MatMulIntegerToFloat")]
    assert read == ["x/u8", "x/u8", "gated/u8"]


def whole_numbers(folder: Path) -> dict[str, NDArray[np.int8]]:
    return {name: array for name, array in weights_of(folder).items() if name.endswith("/s8")}


@pytest.mark.parametrize(("method", "most"), [(PerToken, 127), (REDUCED, 63)])
def test_weights_stay_within_their_range(method: Any, most: int, tmp_path: Path) -> None:
    folder = mlp(tmp_path, method=method)
    found = whole_numbers(folder)
    assert len(found) == 3
    for array in found.values():
        assert np.all(np.abs(array.astype(int)).max(axis=0) == most)  # of each channel


def test_reduced_range_gives_the_numbers_of_its_rounding(tmp_path: Path) -> None:
    weight, x = draw(50, 101), draw(1, 5, 50, seed=4)
    folder = quantized(tmp_path, [product("w")], {"w": weight}, REDUCED)
    expected = by_hand(x, weight, levels=63)
    np.testing.assert_allclose(answer(folder, x), expected, rtol=1e-4, atol=1e-4)


def test_no_pair_of_reduced_products_leaves_16_bits() -> None:
    """What CPUs without VNNI add in 16 bits: activations are bytes from 1 to 255."""
    assert 2 * 255 * 63 < 2**15 <= 2 * 255 * 127


@pytest.mark.parametrize("opset", [13, 17, 18, 21])
@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("width", [50, 64])
def test_graphs_of_every_opset_and_number_of_axes_are_taken(
    opset: int, axes: int, width: int, tmp_path: Path
) -> None:
    x = draw(*[2, 5][: axes - 1], width, seed=4)
    folder = quantized(tmp_path, [product("w")], {"w": draw(width, 101)}, opset=opset, axes=axes)
    np.testing.assert_allclose(answer(folder, x), answer(tmp_path / "plain", x), atol=0.5)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_gemm_becomes_a_matrix_and_a_bias(is_transposed: bool, tmp_path: Path) -> None:
    """As GPT-2 has them, and OPT (transposed)."""
    gemm = helper.make_node("Gemm", ["x", "w", "b"], ["y"], "/c_attn", transB=int(is_transposed))
    weight = draw(101, 64) if is_transposed else draw(64, 101)
    weights = {"w": weight, "b": 10 * draw(101, seed=4)}
    folder = quantized(tmp_path, [gemm], weights, axes=2)
    assert [node.name for node in nodes_of(folder, "MatMulIntegerToFloat")] == ["/c_attn"]
    x = draw(3, 64, seed=5)
    np.testing.assert_allclose(answer(folder, x), answer(tmp_path / "plain", x), atol=0.5)
    assert not [
        name
        for name, w in weights_of(folder).items()
        if w.shape == weight.shape and w.dtype == np.float32
    ]


def test_gemm_that_does_more_is_left_as_it_is(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["doubled"], "/gemm", alpha=2.0),
        product("v", x="doubled"),
    ]
    folder = quantized(tmp_path, nodes, {"w": draw(64, 64), "v": draw(64, 80, seed=4)}, axes=2)
    assert [node.name for node in nodes_of(folder, "Gemm")] == ["/gemm"]
    x = draw(3, 64, seed=5)
    expected = answer(tmp_path / "plain", x)
    np.testing.assert_allclose(answer(folder, x), expected, atol=0.03 * np.abs(expected).max())


def test_weight_that_a_node_transposes_is_quantized_and_left_behind(tmp_path: Path) -> None:
    """A tied LM head: its rows are looked up, too."""
    nodes = [
        helper.make_node("Cast", ["x"], ["ids"], to=TensorProto.INT64),
        helper.make_node("Gather", ["w", "ids"], ["hidden"], "/embed"),
        helper.make_node("Transpose", ["w"], ["turned"], perm=[1, 0]),
        product("turned", x="hidden"),
    ]
    plain = write_graph(tmp_path / "plain", nodes, {"w": draw(101, 64)}, axes=2)
    edit_graph(plain, lambda model: model.graph.output[0].type.tensor_type.shape.dim.add())
    (folder := tmp_path / "quantized").mkdir()
    rewrite(plain, folder, PerToken)
    assert nodes_of(folder, "Transpose") == []
    assert {w.dtype for w in weights_of(folder).values() if w.size == 101 * 64} == {np.dtype("i1")}
    x = np.array([[0, 7, 100]], np.float32)
    expected = answer(plain, x)
    np.testing.assert_allclose(answer(folder, x), expected, atol=0.03 * np.abs(expected).max())


def test_one_weight_of_two_matrices_is_written_once(tmp_path: Path) -> None:
    nodes = [product("w", y="once"), product("w", x="once")]
    nodes[0].name = "/first"
    folder = quantized(tmp_path, nodes, {"w": draw(80, 80)})
    assert len(whole_numbers(folder)) == 1
    x = draw(1, 3, 80, seed=4)
    expected = answer(tmp_path / "plain", x)
    np.testing.assert_allclose(answer(folder, x), expected, atol=0.03 * np.abs(expected).max())


def test_every_weight_of_a_kilobyte_lies_in_the_data_file(
    tiny_llama: TinyModel, built: Build
) -> None:
    """And smaller ones in the graph, where ONNX Runtime reads shapes."""
    folder = built(tiny_llama.source, "int8")
    model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    outside = {tensor.name for tensor in external_tensors(model)}
    large = {name for name, array in weights_of(folder).items() if array.nbytes >= 1024}
    assert outside == large
    assert any(name.startswith("per_token/hadamard") for name in outside)


def test_whole_model_has_no_float_matrix_left(tiny_llama: TinyModel, built: Build) -> None:
    """But the Hadamard matrices."""
    folder = built(tiny_llama.source, "int8")
    assert len(nodes_of(folder, "MatMulIntegerToFloat")) == 2 * 5 + 1
    assert {node.input[1] for node in nodes_of(folder, "MatMul")} == {"per_token/hadamard_32"}
    # For each layer: in front of qkv, o, gate and up, down; and of the LM head.
    assert len(nodes_of(folder, "QuantizeLinear")) == 2 * 4 + 1
    embeddings = [node for node in nodes_of(folder, "Gather") if node.input[0].endswith("/rows")]
    assert len(embeddings) == 1
