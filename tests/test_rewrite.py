"""What a quantized graph keeps of the old one: everything that is not a matrix, in its own type."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantize import MODEL_FILE
from quantize.errors import QuantizeError
from quantize.external_data import is_external
from quantize.graph_file import load_graph
from quantize.rewrite import rewrite
from quantize.tensors import Weights, WeightWriter
from quantize.weight_only import WeightOnly

from .conftest import Build, TinyModel
from .matrices import answer, draw, nodes_of, product, weights_of, write_graph


def test_edits_are_made_in_the_order_in_which_they_were_noted(tmp_path: Path) -> None:
    folder = write_graph(tmp_path, [product("w")], {"w": np.ones((2, 3), np.float32)})
    weights = Weights(load_graph(folder / MODEL_FILE), folder)
    weights.edit("w", lambda w: w + 1)
    weights.edit("w", lambda w: w * 10)
    assert np.all(weights.read("w") == 20)
    assert np.all(weights.stored("w") == 1)


def test_weight_that_is_written_twice_is_written_once(tmp_path: Path) -> None:
    with WeightWriter(tmp_path) as writer:
        for _ in range(2):
            assert writer.add("w", draw(64, 64)) == "w"
    assert (tmp_path / f"{MODEL_FILE}.data").stat().st_size == 64 * 64 * 4


def test_data_file_that_is_cut_off_is_named(tmp_path: Path, tiny_llama: TinyModel) -> None:
    source = shutil.copytree(tiny_llama.folder, tmp_path / "source")
    (source / f"{MODEL_FILE}.data").write_bytes(b"short")
    (tmp_path / "to").mkdir()
    with pytest.raises(QuantizeError, match=rf"{MODEL_FILE}.data is cut short"):
        rewrite(source, tmp_path / "to", WeightOnly)


def test_weights_in_attributes_come_along(tmp_path: Path) -> None:
    """A constant that a node has, in the data file of the old graph (FR04)."""
    bias = numpy_helper.from_array(draw(101, seed=4))
    nodes = [
        product("w", y="product"),
        helper.make_node("Constant", [], ["bias"], value=bias),
        helper.make_node("Add", ["product", "bias"], ["y"]),
    ]
    plain = write_graph(tmp_path / "plain", nodes, {"w": draw(64, 101)})
    x = draw(1, 3, 64, seed=5)
    expected = answer(plain, x)
    outside = {"location": "w", "size_threshold": 0, "convert_attribute": True}
    model = onnx.load(plain / MODEL_FILE)
    onnx.save(model, plain / MODEL_FILE, save_as_external_data=True, **outside)
    (folder := tmp_path / "to").mkdir()
    rewrite(plain, folder, WeightOnly)
    shutil.rmtree(plain)
    np.testing.assert_allclose(answer(folder, x), expected, atol=0.3)
    assert is_external(nodes_of(folder, "Constant")[0].attribute[0].t)


def test_graph_without_a_matrix_is_refused(tmp_path: Path) -> None:
    plain = write_graph(tmp_path / "plain", [product("w")], {"w": draw(8, 8)})
    with pytest.raises(QuantizeError, match="nothing to quantize"):
        rewrite(plain, tmp_path, WeightOnly)


def test_weight_that_only_a_branch_reads_comes_along(tmp_path: Path) -> None:
    def branch(name: str) -> onnx.GraphProto:
        value = helper.make_tensor_value_info(f"{name}/y", TensorProto.FLOAT, None)
        node = helper.make_node("Add", ["product", name], [f"{name}/y"])
        return helper.make_graph([node], name, [], [value])

    nodes = [
        product("w", y="product"),
        helper.make_node("If", ["yes"], ["y"], then_branch=branch("b"), else_branch=branch("c")),
    ]
    weights = {"w": draw(64, 101), "b": draw(101, seed=4), "c": draw(101, seed=5)}
    plain = write_graph(tmp_path / "plain", nodes, weights)
    model = load_graph(plain / MODEL_FILE)
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    (plain / MODEL_FILE).write_bytes(model.SerializeToString())
    (folder := tmp_path / "to").mkdir()
    rewrite(plain, folder, WeightOnly)
    x = draw(1, 3, 64, seed=6)
    np.testing.assert_allclose(answer(folder, x), answer(plain, x), atol=0.3)


def test_weight_that_nobody_reads_any_more_is_left_behind(
    tiny_llama: TinyModel, built: Build
) -> None:
    folder = built(tiny_llama.source, "int8")
    old, new = weights_of(tiny_llama.folder), weights_of(folder)
    kept = {name for name in new.keys() & old.keys() if old[name].ndim == 2}
    assert kept == {"cos_cache", "sin_cache"}
    nodes = load_graph(folder / MODEL_FILE).graph.node
    assert new.keys() <= {name for node in nodes for name in node.input}


def test_nodes_without_names_do_not_get_the_same_ones(tmp_path: Path) -> None:
    """ONNX Runtime refuses two nodes of one name."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["once"]),
        helper.make_node("Gemm", ["once", "w", "b"], ["y"]),
    ]
    weights = {"w": draw(64, 64), "b": draw(64, seed=4)}
    plain = write_graph(tmp_path / "plain", nodes, weights, axes=2)
    (folder := tmp_path / "to").mkdir()
    rewrite(plain, folder, WeightOnly)
    x = draw(3, 64, seed=5)
    expected = answer(plain, x)
    np.testing.assert_allclose(answer(folder, x), expected, atol=0.03 * np.abs(expected).max())


def test_embedding_is_looked_up_in_8_bits_with_a_scale_per_row(tmp_path: Path) -> None:
    table = draw(101, 64) * np.linspace(0.01, 100, 101, dtype=np.float32)[:, None]
    table[7] = 0
    gather = helper.make_node("Gather", ["table", "ids"], ["looked_up"], "/embed")
    cast = helper.make_node("Cast", ["x"], ["ids"], to=TensorProto.INT64)
    plain = write_graph(
        tmp_path / "plain",
        [cast, gather, product("w", x="looked_up")],
        {"table": table, "w": np.eye(64, 64, dtype=np.float32)},
        axes=2,
    )
    model = load_graph(plain / MODEL_FILE)
    model.graph.output[0].type.tensor_type.shape.dim.add()
    (plain / MODEL_FILE).write_bytes(model.SerializeToString())
    (folder := tmp_path / "to").mkdir()
    rewrite(plain, folder, WeightOnly)
    assert weights_of(folder)["table/rows"].dtype == np.int8
    x = np.array([[0, 7, 100, 50]], np.float32)
    found, expected = answer(folder, x)[0], answer(plain, x)[0]
    size = np.abs(table[[0, 7, 100, 50]]).max(axis=1, keepdims=True)
    assert np.all(found[1] == 0)
    assert np.all(np.abs(found - expected) <= 0.02 * size + 1e-6)
    assert len(nodes_of(folder, "Gather")) == 2
