"""An ONNX export as a source: which graph, what it is refused for, and all its files (FR04)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantize import MODEL_FILE
from quantize.errors import QuantizeError
from quantize.external_data import is_external
from quantize.graph_copy import copy_graph
from quantize.graph_file import all_tensors, load_graph
from quantize.onnx_source import check_onnx, find_graph
from quantize.sources import resolve

from .conftest import Bring, Build, TinyModel
from .edits import edit_json
from .folders import make_portable
from .matrices import weights_of
from .tiny import VOCAB

NAMES = ["w", "model.onnx_data", "a/b.data"]


@pytest.fixture
def folder(tiny_llama: TinyModel, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_llama.folder, tmp_path / "export")


def refusal(path: Path) -> str:
    with pytest.raises(QuantizeError) as raised:
        check_onnx(path)
    return str(raised.value)


def write_graph(folder: Path, location: str) -> Path:
    """y = x @ weight + bias: one in an initializer, one in a node's attribute, both in a file."""
    rng = np.random.default_rng(3)
    weight, bias = rng.random((64, 8), np.float32), rng.random(8, np.float32)
    data = folder / location
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_bytes(b"pad." + weight.tobytes() + bias.tobytes())
    tensors = [numpy_helper.from_array(a, n) for a, n in ((weight, "weight"), (bias, "bias"))]
    for tensor, offset in zip(tensors, (4, 4 + weight.nbytes), strict=True):
        length = len(tensor.raw_data)
        tensor.ClearField("raw_data")
        for key, value in (("location", location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        tensor.data_location = TensorProto.EXTERNAL
    nodes = [
        helper.make_node("Constant", [], ["b"], value=tensors[1]),
        helper.make_node("MatMul", ["x", "weight"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, w]) for n, w in NODES)
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], initializer=[tensors[0]]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    (folder / "any.onnx").write_bytes(model.SerializeToString())
    return folder / "any.onnx"


NODES = (("x", 64), ("y", 8))


def answer(graph: Path) -> np.ndarray:
    x = np.random.default_rng(5).random((2, 64), np.float32)
    return ort.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


@pytest.mark.parametrize("location", NAMES)
def test_copy_takes_all_weights_along_whatever_their_file_is_called(
    location: str, tmp_path: Path
) -> None:
    (tmp_path / "from").mkdir()
    graph = write_graph(tmp_path / "from", location)
    expected = answer(graph)
    target = tmp_path / "to"
    target.mkdir()
    copy_graph(graph, target)
    shutil.rmtree(tmp_path / "from")
    files = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert files == {MODEL_FILE, f"{MODEL_FILE}.data"}
    np.testing.assert_array_equal(answer(target / MODEL_FILE), expected)


def test_copy_moves_weights_out_of_the_graph(tmp_path: Path) -> None:
    whole = onnx.load(write_graph(tmp_path, "w"))
    onnx.save(whole, tmp_path / "whole.onnx")
    expected = answer(tmp_path / "whole.onnx")
    target = tmp_path / "to"
    target.mkdir()
    copy_graph(tmp_path / "whole.onnx", target)
    graph = load_graph(target / MODEL_FILE)
    assert [t.name for t in all_tensors(graph) if is_external(t)] == ["weight"]
    np.testing.assert_array_equal(answer(target / MODEL_FILE), expected)


def test_tensors_that_share_their_bytes_go_on_sharing_them(tmp_path: Path) -> None:
    graph = write_graph(tmp_path, "w")
    model = load_graph(graph)
    twin = model.graph.initializer.add()
    twin.CopyFrom(model.graph.initializer[0])
    twin.name = "twin"
    graph.write_bytes(model.SerializeToString())
    target = tmp_path / "to"
    target.mkdir()
    copy_graph(graph, target)
    first, second = (
        list(t.external_data) for t in load_graph(target / MODEL_FILE).graph.initializer
    )
    assert first == second


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data.unlink(), "is missing: it must lie beside the graph"),
        (lambda data: data.rename(data.with_name("other")), "is missing"),
        (lambda data: data.write_bytes(data.read_bytes()[:-1]), "is cut short"),
    ],
    ids=["deleted", "renamed", "truncated"],
)
def test_data_file_that_is_not_whole_is_named_and_nothing_is_copied(
    spoil: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    graph = write_graph(tmp_path, "a/b.data")
    spoil(tmp_path / "a" / "b.data")
    target = tmp_path / "to"
    target.mkdir()
    with pytest.raises(QuantizeError, match=f"b.data {says}"):
        copy_graph(graph, target)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("location", ["../w", "/etc/passwd"])
def test_weights_outside_the_folder_are_refused(location: str, tmp_path: Path) -> None:
    model = load_graph(write_graph(tmp_path, "w"))
    model.graph.initializer[0].external_data[0].value = location
    (tmp_path / "any.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(QuantizeError, match="lies outside of the folder"):
        copy_graph(tmp_path / "any.onnx", tmp_path / "to")


def test_file_that_is_no_graph_is_named(tmp_path: Path) -> None:
    (tmp_path / MODEL_FILE).write_bytes(b"\xff" * 100)
    with pytest.raises(QuantizeError, match="is not an ONNX graph, or cut short .100 bytes"):
        load_graph(tmp_path / MODEL_FILE)


def test_export_is_taken_as_a_graph(folder: Path, tmp_path: Path) -> None:
    with resolve(str(folder), tmp_path / "cache", tmp_path) as source:
        assert (source.kind, source.form, source.graph) == ("onnx", "fused", folder / MODEL_FILE)
        assert source.description == f"export/{MODEL_FILE}"


def test_graph_in_a_folder_of_its_own_finds_the_config_above(folder: Path) -> None:
    (folder / "onnx").mkdir()
    for name in (MODEL_FILE, f"{MODEL_FILE}.data"):
        (folder / name).rename(folder / "onnx" / name)
    graph = find_graph(folder)
    assert graph == folder / "onnx" / MODEL_FILE
    assert check_onnx(graph).folder == folder


def test_one_of_several_graphs_must_be_named(folder: Path) -> None:
    graph = (folder / MODEL_FILE).rename(folder / "decoder_model.onnx")
    shutil.copyfile(graph, folder / "decoder_with_past_model.onnx")
    with pytest.raises(QuantizeError, match="holds several graphs .decoder_model.onnx, decoder_wi"):
        find_graph(folder)
    assert find_graph(graph) == graph


def edit(folder: Path, change: Callable[[onnx.GraphProto], object]) -> Path:
    model = load_graph(folder / MODEL_FILE)
    change(model.graph)
    (folder / MODEL_FILE).write_bytes(model.SerializeToString())
    return folder / MODEL_FILE


def drop_inputs(*words: str) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        kept = [value for value in graph.input if not any(word in value.name for word in words)]
        del graph.input[:]
        graph.input.extend(kept)

    return change


def drop_outputs(name: str) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        graph.output.remove(next(value for value in graph.output if value.name == name))

    return change


def retype_ids(graph: onnx.GraphProto) -> None:
    [ids] = [value for value in graph.input if value.name == "input_ids"]
    ids.type.tensor_type.elem_type = TensorProto.INT32


def ask_for_positions(graph: onnx.GraphProto) -> None:
    rename_operators(graph)
    graph.input.append(
        helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["rows", "tokens"])
    )


def rename_operators(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        node.op_type = {"GroupQueryAttention": "Attention"}.get(node.op_type, node.op_type)


def flatten_cache(graph: onnx.GraphProto) -> None:
    for value in graph.input:
        if "past" in value.name:
            del value.type.tensor_type.shape.dim[3]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop_inputs("past_key_values"), "exported without a KV cache"),
        (drop_inputs("attention_mask"), "lacks the inputs attention_mask"),
        (drop_inputs("past_key_values.1"), "cache of 1 layers, and config.json says 2"),
        (rename_operators, "takes no position_ids"),
        (flatten_cache, r"not laid out as \(rows, heads, tokens, head_dim\)"),
        (lambda graph: graph.input.add(name="use_cache_branch"), "optimum's older form"),
        (lambda graph: graph.input.add(name="num_logits_to_keep"), "feed its inputs num_logits"),
        (drop_outputs("logits"), "lacks the outputs logits"),
        (drop_outputs("present.1.key"), "lacks the outputs present.1.key"),
        (retype_ids, "input_ids has type int32; int64 is expected"),
        (lambda graph: graph.node.add(op_type="MatMulNBits"), "quantized already .MatMulNBits"),
    ],
    ids=[
        *("no cache", "no mask", "layers", "no positions", "layout", "merged", "unknown input"),
        *("no logits", "no present", "type of ids", "quantized"),
    ],
)
def test_graph_that_cannot_be_used_is_refused_with_the_reason(
    change: Callable[[onnx.GraphProto], object], says: str, folder: Path
) -> None:
    with pytest.raises(QuantizeError, match=says):
        check_onnx(edit(folder, change))


def test_portable_export_that_froze_its_rotary_embedding_is_refused(folder: Path) -> None:
    graph = edit(folder, ask_for_positions)
    assert check_onnx(graph).form == "portable"
    edit_json(folder / "config.json", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert "tracing freezes its rope_scaling 'dynamic'" in refusal(graph)


def retype_weights(kind: int) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            if is_external(tensor):
                tensor.data_type = kind
                for entry in tensor.external_data:
                    if entry.key == "length":  # both types take half of what fp32 takes
                        entry.value = str(int(entry.value) // 2)

    return change


def test_weights_of_a_type_that_no_precision_has_are_refused(folder: Path) -> None:
    graph = edit(folder, retype_weights(TensorProto.BFLOAT16))
    assert "has weights in bfloat16: export it in float32" in refusal(graph)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_fp16_graph_is_not_rounded_once_more(
    precision: str, folder: Path, tmp_path: Path, build_folder: Build
) -> None:
    graph = edit(folder, retype_weights(TensorProto.FLOAT16))
    assert check_onnx(graph).dtype == "fp16"
    says = f"in fp16, and {precision} for cpu is made of a graph in fp32"
    with pytest.raises(QuantizeError, match=says):
        build_folder(folder, precision)


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_fp32_graph_is_not_converted_for_cuda(
    precision: str, folder: Path, build_folder: Build
) -> None:
    says = f"in fp32, and {precision} for cuda is made of a graph in fp16"
    with pytest.raises(QuantizeError, match=says):
        build_folder(folder, precision, "cuda")


def test_fp16_graph_is_quantized_for_cuda(tiny_llama: TinyModel, built: Build) -> None:
    fp16 = built(tiny_llama.source, "fp16", "cuda")
    record = json.loads((built(fp16, "int8", "cuda") / "quantization.json").read_text())
    assert (record["kind"], record["precision"], record["device"]) == ("onnx", "int8", "cuda")
    assert record["quantization"]["matrices"] == 11


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", f"{MODEL_FILE}.data"])
def test_missing_file_of_an_export_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    assert f"{name} is missing" in refusal(folder / MODEL_FILE)


def test_every_matrix_of_another_tools_export_is_quantized(
    tiny_llama: TinyModel, bring: Bring, built: Build
) -> None:
    """optimum's own, whose LM head is tied to the embedding."""
    folder = built(bring(make_portable, tiny_llama.source), "int8")
    record = json.loads((folder / "quantization.json").read_text())
    assert (record["kind"], record["form"]) == ("onnx", "portable")
    assert record["quantization"]["matrices"] == 2 * 5 + 1  # keys' and values' are too small
    large = [w.dtype for w in weights_of(folder).values() if w.ndim > 1 and w.size > 4096]
    assert large == [np.int8] * (2 * 3 + 2)  # gate, up, down; embedding and LM head


def test_export_is_quantized_as_it_is(
    tiny_llama: TinyModel, build_folder: Build, tmp_path: Path
) -> None:
    """Its weights under another name, as other tools write them."""
    export = shutil.copytree(tiny_llama.folder, tmp_path / "export")
    model = onnx.load(export / MODEL_FILE)
    (export / f"{MODEL_FILE}.data").unlink()
    onnx.save(model, export / MODEL_FILE, save_as_external_data=True, location="w")
    output = build_folder(export, "int8")
    record = json.loads((output / "quantization.json").read_text())
    assert record["source"] == f"export/{MODEL_FILE}"
    assert (record["kind"], record["form"]) == ("onnx", "fused")
    operators = {node.op_type for node in load_graph(output / MODEL_FILE).graph.node}
    assert {"GroupQueryAttention", "MatMulIntegerToFloat"} <= operators
    assert not (output / "w").exists()
    session = ort.InferenceSession(output / MODEL_FILE, providers=["CPUExecutionProvider"])
    assert session.get_outputs()[0].shape[-1] == VOCAB
