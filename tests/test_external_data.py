"""Where a graph keeps its tensors: wherever a protobuf can hold one, and never guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper

from app.errors import UnservableModel
from app.graph import read_graph
from quantize.errors import QuantizeError
from quantize.external_data import external_tensors, place_of
from quantize.graph_file import all_nodes, load_graph


def outside(location: str, **entries: int) -> TensorProto:
    """4 floats that lie in `location`."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def graph(*nodes: onnx.NodeProto, weights: tuple[TensorProto, ...] = ()) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "graph", [], [], list(weights))


def constant(location: str) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["c"], value=outside(location))


def branching(location: str) -> onnx.NodeProto:
    branch = graph(weights=(outside(location),))
    return helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=graph())


def in_function() -> onnx.ModelProto:
    function = helper.make_function("mine", "F", [], ["c"], [constant("f")], [])
    return helper.make_model(graph(), functions=[function])


def in_list_of_tensors() -> onnx.ModelProto:
    attribute = AttributeProto(name="all", type=AttributeProto.TENSORS, tensors=[outside("l")])
    node = helper.make_node("Custom", [], ["y"])
    node.attribute.append(attribute)
    return helper.make_model(graph(node))


def in_sparse_initializer() -> onnx.ModelProto:
    inner = graph()
    inner.sparse_initializer.add(values=outside("s"))
    return helper.make_model(inner)


@pytest.mark.parametrize(
    ("make", "location"),
    [
        (lambda: helper.make_model(graph(weights=(outside("w"),))), "w"),
        (lambda: helper.make_model(graph(constant("a/b.data"))), "a/b.data"),
        (lambda: helper.make_model(graph(branching("branch"))), "branch"),
        (in_function, "f"),
        (in_list_of_tensors, "l"),
        (in_sparse_initializer, "s"),
    ],
    ids=["initializer", "attribute", "nested graph", "function", "list of tensors", "sparse"],
)
def test_file_is_found_wherever_a_tensor_can_be(
    make: Callable[[], onnx.ModelProto], location: str
) -> None:
    [tensor] = external_tensors(make())
    assert tensor.location == location


def test_tensor_inside_the_graph_needs_no_file() -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    assert external_tensors(helper.make_model(graph(weights=(weight,)))) == []


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [(TensorProto.FLOAT, 60), (TensorProto.FLOAT16, 30), (TensorProto.INT4, 8)],
    ids=["4 bytes", "2 bytes", "half a byte, rounded up"],
)
def test_size_is_that_of_shape_and_type(kind: int, num_bytes: int) -> None:
    weight = outside("w", offset=100)
    weight.data_type, weight.dims[:] = kind, [3, 5]
    [tensor] = external_tensors(helper.make_model(graph(weights=(weight,))))
    assert (tensor.num_bytes, tensor.end) == (num_bytes, 100 + num_bytes)


@pytest.mark.parametrize("entries", [{"offset": -8}, {"length": -1}], ids=str)
def test_negative_place_is_refused(entries: dict[str, int]) -> None:
    model = helper.make_model(graph(weights=(outside("w", **entries),)))
    with pytest.raises(QuantizeError, match="w in w has a negative"):
        external_tensors(model)


def test_tensor_outside_without_a_file_name_is_refused() -> None:
    weight = outside("")
    with pytest.raises(QuantizeError, match="no file is named"):
        external_tensors(helper.make_model(graph(weights=(weight,))))


def test_nodes_of_nested_graphs_and_functions_are_counted() -> None:
    inner = graph(constant("x"))
    node = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=graph())
    function = helper.make_function("mine", "F", [], ["c"], [constant("f")], [])
    model = helper.make_model(graph(node), functions=[function])
    assert [n.op_type for n in all_nodes(model)] == ["If", "Constant", "Constant"]


def test_length_that_is_not_that_of_the_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(bytes(100))
    place_of(outside("w", length=16), tmp_path)
    with pytest.raises(QuantizeError, match="w needs 16 bytes by its shape, and 12 are stated"):
        place_of(outside("w", length=12), tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"\xff" * 100, r"not an ONNX graph, or cut short \(100 bytes\)"),
        (b"", r"holds no graph \(0 bytes\)"),
    ],
    ids=["pointer", "other bytes", "empty"],
)
def test_file_that_is_no_graph_is_refused_in_the_servers_words(
    content: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(QuantizeError, match=says):
        load_graph(path)
    with pytest.raises(UnservableModel, match=says):
        read_graph(tmp_path)
