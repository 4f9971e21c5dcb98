"""With the softmax's scale in the weights, attention gives the same and its nodes multiply by 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quantize import MODEL_FILE
from quantize.graph_file import load_graph
from quantize.query_scale import fold_scales
from quantize.rewrite import MICROSOFT

from .conftest import Named
from .matrices import attributes, draw, nodes_of
from .tiny_families import FAMILIES

WIDTH, HEADS, KV_HEADS, TOKENS = 48, 4, 2, 5
PAST = ("past", "past_value")


def node(op_type: str, inputs: list[str], output: str, **fields: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, [output], output, **fields)


def attention(inputs: list[str], **fields: Any) -> onnx.NodeProto:
    """Behind `inputs`: queries, keys and values."""
    return helper.make_node(
        "GroupQueryAttention",
        [*inputs, *PAST, "seqlens", "total", "cos", "sin"],
        ["y", "present", "present_value"],
        "attention",
        domain=MICROSOFT,
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=1,
        **fields,
    )


def write(
    folder: Path,
    nodes: list[onnx.NodeProto],
    weights: dict[str, NDArray[Any]],
    head_dim: int,
    outputs: tuple[str, ...] = (),
) -> Path:
    """A graph from `x` to `y` and `outputs`, with its large weights in a file beside it."""
    angles = draw(TOKENS, head_dim // 2, seed=9)
    weights = weights | {"cos": np.cos(angles), "sin": np.sin(angles)}
    weights |= {"seqlens": np.array([TOKENS - 1], np.int32), "total": np.array([TOKENS], np.int32)}
    cache = [1, KV_HEADS, 0, head_dim]
    inputs = {"x": [1, TOKENS, WIDTH]} | dict.fromkeys(PAST, cache)
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", *outputs)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save_model(
        model, folder / MODEL_FILE, save_as_external_data=True, location="data", size_threshold=256
    )
    return folder


def answer(folder: Path, head_dim: int) -> NDArray[np.float32]:
    session = ort.InferenceSession(folder / MODEL_FILE, providers=["CPUExecutionProvider"])
    empty = np.zeros((1, KV_HEADS, 0, head_dim), np.float32)
    y: NDArray[np.float32] = session.run(
        ["y"], {"x": draw(1, TOKENS, WIDTH), **dict.fromkeys(PAST, empty)}
    )[0]
    return y


def fold(folder: Path) -> None:
    model = load_graph(folder / MODEL_FILE)
    fold_scales(model.graph, folder)
    onnx.save(model, folder / MODEL_FILE)


def packed(head_dim: int, **fields: Any) -> tuple[list[onnx.NodeProto], dict[str, NDArray[Any]]]:
    """One matrix for queries, keys and values, with a bias: as of Phi-3, Llama, Qwen2."""
    width = (HEADS + 2 * KV_HEADS) * head_dim
    nodes = [
        node("MatMul", ["x", "w"], "product"),
        node("Add", ["product", "b"], "qkv"),
        attention(["qkv", "", ""], **fields),
    ]
    return nodes, {"w": draw(WIDTH, width) / 7, "b": draw(width, seed=4)}


def normed(head_dim: int, **fields: Any) -> tuple[list[onnx.NodeProto], dict[str, NDArray[Any]]]:
    """A matrix each, and a norm of each query head: as of Qwen3."""
    nodes = [
        node("MatMul", ["x", "q"], "queries"),
        node("Reshape", ["queries", "split"], "heads"),
        node("SimplifiedLayerNormalization", ["heads", "norm"], "calm", epsilon=1e-6, axis=-1),
        node("Reshape", ["calm", "join"], "normed"),
        node("MatMul", ["x", "k"], "keys"),
        node("MatMul", ["x", "v"], "values"),
        attention(["normed", "keys", "values"], **fields),
    ]
    weights: dict[str, NDArray[Any]] = {
        name: draw(WIDTH, heads * head_dim, seed=seed) / 7
        for seed, (name, heads) in enumerate([("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)])
    }
    weights["split"] = np.array([0, TOKENS, HEADS, head_dim])
    weights["join"] = np.array([0, TOKENS, HEADS * head_dim])
    return nodes, weights | {"norm": 1 + draw(head_dim, seed=8) / 3}


@pytest.mark.parametrize("make", [packed, normed])
@pytest.mark.parametrize("fields", [{}, {"scale": 0.3}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64])
def test_folded_scale_gives_the_same_attention(
    make: Any, fields: dict[str, Any], head_dim: int, tmp_path: Path
) -> None:
    folder = write(tmp_path, *make(head_dim, **fields), head_dim)
    before = answer(folder, head_dim)
    fold(folder)
    [found] = nodes_of(folder, "GroupQueryAttention")
    assert attributes(found)["scale"] == 1
    assert attributes(found).get("softcap") == fields.get("softcap")
    atol = 0 if head_dim == 64 and "scale" not in fields else 5e-5  # 1/8 is a power of two
    np.testing.assert_allclose(answer(folder, head_dim), before, rtol=0, atol=atol)


def test_scale_stays_where_something_else_reads_the_queries(tmp_path: Path) -> None:
    nodes, weights = packed(32)
    folder = write(tmp_path, nodes, weights, 32, outputs=("qkv",))
    before = (folder / "data").read_bytes()
    fold(folder)
    [found] = nodes_of(folder, "GroupQueryAttention")
    assert "scale" not in attributes(found)
    assert (folder / "data").read_bytes() == before


def test_scale_stays_where_two_layers_share_their_matrix(tmp_path: Path) -> None:
    nodes, weights = packed(32)
    nodes.append(node("MatMul", ["x", "w"], "again"))
    folder = write(tmp_path, nodes, weights, 32, outputs=("again",))
    fold(folder)
    [found] = nodes_of(folder, "GroupQueryAttention")
    assert "scale" not in attributes(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_graph_of_every_family_has_its_scales_in_its_weights(
    name: str, family_graph: Named
) -> None:
    """That it still gives transformers' logits is shown in test_families.py."""
    nodes = nodes_of(family_graph(name), "GroupQueryAttention")
    assert nodes
    assert all(attributes(found)["scale"] == 1 for found in nodes)
