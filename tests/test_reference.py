"""The graph read piece by piece says what it says whole, and leaves nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from quantize import MODEL_FILE
from quantize.decoding import Decoding
from quantize.errors import QuantizeError
from quantize.reference import Reference

from .conftest import Named
from .edits import edit_graph

IDS = np.random.default_rng(3).integers(0, 260, (3, 12))
NODE_BY_NODE, WHOLE = 0, 1 << 30


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


FUSED, PORTABLE = ["llama", "phi3-4k", "gemma2", "granite"], ["gpt2", "gpt_neox"]


@pytest.mark.parametrize(
    ("name", "piece_bytes"),
    [
        *((name, size) for name in FUSED for size in (NODE_BY_NODE, 30_000, WHOLE)),
        *((name, size) for name in PORTABLE for size in (30_000, WHOLE)),  # hundreds of nodes
    ],
)
def test_logits_of_every_token_are_those_of_decoding(
    name: str, piece_bytes: int, family_graph: Named
) -> None:
    folder = family_graph(name)
    before = names_in(folder)
    shares: list[float] = []
    reference = Reference(folder, IDS, shares.append, piece_bytes)
    decoding = Decoding(folder, *IDS.shape)
    for column in range(IDS.shape[1]):
        expected = decoding.feed(IDS[:, column : column + 1])
        np.testing.assert_allclose(reference.logits(column), expected, atol=1e-4)
    assert names_in(folder) == before
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert (len(shares) == 1) is (piece_bytes == WHOLE)


def test_value_that_only_a_graph_inside_a_node_reads_is_kept(
    family_graph: Named, tmp_path: Path
) -> None:
    """As in the builder's own longrope graphs, whose branches hold the rotary caches."""
    folder = shutil.copytree(family_graph("phi3-4k"), tmp_path / "folder")
    edit_graph(folder, put_last_sum_into_a_branch)
    reference = Reference(folder, IDS, piece_bytes=NODE_BY_NODE)
    expected = Decoding(family_graph("phi3-4k"), *IDS.shape)
    for column in range(IDS.shape[1]):
        logits = expected.feed(IDS[:, column : column + 1])
        np.testing.assert_allclose(reference.logits(column), logits, atol=1e-4)


def put_last_sum_into_a_branch(model: onnx.ModelProto) -> None:
    """What the last attention writes passes an If that reads it from outside."""
    graph = model.graph
    place, node = next(
        (i, n) for i, n in enumerate(graph.node) if n.name.endswith("layers.1/attn/o_proj/MatMul")
    )
    value = node.output[0]
    reader = next(n for n in graph.node if value in n.input)
    branch = helper.make_graph(
        [helper.make_node("Identity", [value], ["inside"])],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("inside", onnx.TensorProto.FLOAT, None)],
    )
    condition = helper.make_tensor("yes", onnx.TensorProto.BOOL, [], [True])
    graph.initializer.append(condition)
    chosen = helper.make_node("If", ["yes"], ["chosen"], then_branch=branch, else_branch=branch)
    graph.node.insert(place + 1, chosen)
    reader.input[list(reader.input).index(value)] = "chosen"


def test_graph_that_onnxruntime_refuses_leaves_no_file(family_graph: Named, tmp_path: Path) -> None:
    folder = shutil.copytree(family_graph("llama"), tmp_path / "folder")
    before = names_in(folder)
    edit_graph(folder, rename_an_operator)
    with pytest.raises(Exception, match="Teleport"):
        Reference(folder, IDS)
    assert names_in(folder) == before


def rename_an_operator(model: onnx.ModelProto) -> None:
    model.graph.node[-9].op_type = "Teleport"


def test_graph_without_an_lm_head_is_refused(family_graph: Named, tmp_path: Path) -> None:
    folder = shutil.copytree(family_graph("llama"), tmp_path / "folder")
    edit_graph(folder, lambda model: model.graph.node[-1].output.__setitem__(0, "others"))
    with pytest.raises(QuantizeError, match="LM head was not found"):
        Reference(folder, IDS)
    assert (folder / MODEL_FILE).is_file()
