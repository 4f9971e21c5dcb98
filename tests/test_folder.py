"""What lies in a model folder: which file is the graph, are its data files whole, what is refused.

Read off the files; a session is opened only to show that what is taken also loads.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from app.errors import UnservableModel
from app.external_data import find_data_problems
from app.folder import find_graph, read_context_length, read_io_names
from app.graph import read_graph
from app.model import OnnxModel
from app.sequence import PrefillChunk, StepPlan

from .conftest import TinyModel
from .edits import copy_edited, copy_of
from .engines import greedy
from .live import ROOT
from .logits import cache_for, ids_of_length

LOCATIONS = ["w", "model.onnx_data", "a/b.data", "6f1c2a34-98f0-11ee-b9d1-0242ac120002"]


def write(folder: Path, **files: object) -> Path:
    """JSON files by their stem, and graphs (`graph=[names]`) without content."""
    folder.mkdir(exist_ok=True)
    for name in files.pop("graph", []):  # type: ignore[attr-defined]
        (folder / name).touch()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def named_by_genai(filename: object) -> dict[str, object]:
    return {"model": {"decoder": {"filename": filename}}}


# The graph file


@pytest.mark.parametrize(
    ("present", "genai", "found"),
    [
        (["model.onnx", "b.onnx"], "b.onnx", "model.onnx"),
        (["a.onnx", "b.onnx"], "b.onnx", "b.onnx"),
        (["phi3-mini.onnx", "phi3-mini.onnx.data"], None, "phi3-mini.onnx"),
    ],
)
def test_graph_file_is_found(
    tmp_path: Path, present: list[str], genai: str | None, found: str
) -> None:
    folder = write(tmp_path, graph=present, genai_config=named_by_genai(genai))
    assert find_graph(folder).name == found


@pytest.mark.parametrize(
    ("present", "genai", "reason"),
    [
        ([], None, "it has no model.onnx, nor another"),
        (["a.onnx", "b.onnx"], None, r"several graphs \(a.onnx, b.onnx\)"),
        (["b.onnx"], "a.onnx", "names 'a.onnx', which is not there"),
        (["a.onnx"], "../a.onnx", "no file's name"),
        (["a.onnx"], 7, "no file's name"),
    ],
)
def test_graph_file_that_is_not_clear_is_told(
    tmp_path: Path, present: list[str], genai: object, reason: str
) -> None:
    folder = write(tmp_path, graph=present, genai_config=named_by_genai(genai))
    with pytest.raises(UnservableModel, match=reason):
        find_graph(folder)


# The JSON files


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "su"},
            },
            4096,
        ),
    ],
)
def test_context_is_read_from_config(
    tmp_path: Path, config: dict[str, object], context: int
) -> None:
    assert read_context_length(write(tmp_path, config=config)) == context


def test_context_is_read_from_genai_config_and_the_smaller_one_holds(tmp_path: Path) -> None:
    folder = write(tmp_path, genai_config={"model": {"context_length": 4096}})
    assert read_context_length(folder) == 4096
    write(folder, config={"max_position_embeddings": 2048})
    assert read_context_length(folder) == 2048


def test_names_of_inputs_are_read_from_genai_config(tmp_path: Path) -> None:
    decoder = {"inputs": {"past_key_names": "past_%d_k"}, "outputs": {"logits": "scores"}}
    names = read_io_names(write(tmp_path, genai_config={"model": {"decoder": decoder}}))
    assert (names.past_key, names.past_value) == ("past_%d_k", "past_key_values.%d.value")
    assert (names.logits, names.input_ids) == ("scores", "input_ids")


# Data files


def with_data_at(location: str, folder: Path) -> Path:
    """A graph with two weights of 100 floats each in a data file, beside what is inline."""
    model = helper.make_model(helper.make_graph([], "g", [], []))
    for index, name in enumerate(("one", "two")):
        model.graph.initializer.append(external_tensor(name, location, offset=400 * index))
    (folder / location).parent.mkdir(parents=True, exist_ok=True)
    (folder / location).write_bytes(bytes(800))
    onnx.save(model, folder / "model.onnx")
    return folder / location


def external_tensor(name: str, location: str, offset: int = 0, length: int = 400) -> TensorProto:
    tensor = helper.make_tensor(name, TensorProto.FLOAT, [100], bytes(400), raw=True)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value:
            tensor.external_data.add(key=key, value=str(value))
    return tensor


def problems_of(folder: Path) -> list[str]:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    return find_data_problems(model, folder)


@pytest.mark.parametrize("location", LOCATIONS)
def test_data_file_of_any_name_is_followed(tmp_path: Path, location: str) -> None:
    data = with_data_at(location, tmp_path)
    assert problems_of(tmp_path) == []
    data.write_bytes(bytes(799))
    [problem] = problems_of(tmp_path)
    assert f"{location} is cut short: it has 799 bytes, the graph needs 800" in problem
    data.rename(tmp_path / "renamed")
    [problem] = problems_of(tmp_path)
    assert f"data file {location} is missing" in problem
    (tmp_path / "renamed").unlink()
    assert problems_of(tmp_path) == [problem]


def test_tensor_without_a_length_is_as_long_as_its_elements(tmp_path: Path) -> None:
    tensor = external_tensor("one", "w", offset=8, length=0)
    model = helper.make_model(helper.make_graph([], "g", [], [], initializer=[tensor]))
    (tmp_path / "w").write_bytes(bytes(407))
    [problem] = find_data_problems(model, tmp_path)
    assert "the graph needs 408" in problem


def constant(tensor: TensorProto) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["c"], value=tensor)


def in_attribute(tensor: TensorProto) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph([constant(tensor)], "g", [], []))


def in_subgraph(tensor: TensorProto) -> onnx.ModelProto:
    inner = helper.make_graph([constant(tensor)], "inner", [], [])
    node = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    return helper.make_model(helper.make_graph([node], "g", [], []))


def in_function(tensor: TensorProto) -> onnx.ModelProto:
    function = helper.make_function(
        "own", "f", [], ["c"], [constant(tensor)], [helper.make_opsetid("", 21)]
    )
    return helper.make_model(helper.make_graph([], "g", [], []), functions=[function])


@pytest.mark.parametrize("place", [in_attribute, in_subgraph, in_function])
def test_tensor_anywhere_in_the_graph_counts(
    tmp_path: Path, place: Callable[[TensorProto], onnx.ModelProto]
) -> None:
    [problem] = find_data_problems(place(external_tensor("t", "w")), tmp_path)
    assert "data file w is missing" in problem


@pytest.mark.parametrize("location", ["../w", "/etc/passwd", "a/../../w", ""])
def test_data_file_outside_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "w").write_bytes(bytes(400))
    [problem] = find_data_problems(in_attribute(external_tensor("t", location)), folder)
    assert "outside of the folder" in problem


@pytest.mark.parametrize("location", LOCATIONS)
def test_folder_moved_whole_still_loads(
    tiny_llama: TinyModel, tmp_path: Path, location: str
) -> None:
    def move_data(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location

    folder = copy_edited(tiny_llama.folder, tmp_path / "first", move_data)
    (folder / location).parent.mkdir(exist_ok=True)
    (folder / "model.onnx.data").rename(folder / location)
    moved = shutil.move(folder, tmp_path / "second")
    OnnxModel.load(Path(moved), "cpu", num_threads=1)


def test_missing_file_is_told_before_anything_slow_is_imported(
    tiny_llama: TinyModel, tmp_path: Path
) -> None:
    folder = copy_of(tiny_llama.folder, tmp_path / "copy")
    (folder / "model.onnx.data").rename(folder / "weights.data")
    command = [sys.executable, "-X", "importtime", "-m", "app", "--port", "0"]
    environment = os.environ | {"MODEL_PATH": str(folder), "HOST": "127.0.0.1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    timed = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in timed}
    assert run.returncode == 1
    assert "data file model.onnx.data is missing" in run.stderr
    assert "onnx" in imported
    assert not imported & {"torch", "transformers", "onnxruntime", "optimum"}


# The graph


def test_graph_tells_what_it_stores(tiny: TinyModel) -> None:
    graph = read_graph(tiny.folder)
    assert (graph.form, graph.num_layers, graph.num_kv_heads, graph.head_dim) == ("fused", 2, 2, 16)
    assert graph.past[:2] == ("past_key_values.0.key", "past_key_values.0.value")
    assert (graph.position_ids, graph.has_last_logits_only) == (None, True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no graph"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"\xff" * 100, "not an ONNX graph, or cut short"),
    ],
)
def test_file_that_is_no_graph_is_told(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(UnservableModel, match=reason):
        read_graph(tmp_path)


def drop_past(model: onnx.ModelProto) -> None:
    del model.graph.input[2:]


def turn_keys(model: onnx.ModelProto) -> None:
    """Keys as `(rows, heads, head_dim, tokens)`, as some exporters have them."""
    dims = past(model, "key", 0).type.tensor_type.shape.dim
    dims[2].dim_value = 16
    dims[3].dim_param = "past"


def flatten_keys(model: onnx.ModelProto) -> None:
    del past(model, "key", 0).type.tensor_type.shape.dim[0]


def fix_rows(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def change_type(model: onnx.ModelProto) -> None:
    past(model, "key", 0).type.tensor_type.elem_type = TensorProto.BFLOAT16


def widen_a_layer(model: onnx.ModelProto) -> None:
    past(model, "value", 1).type.tensor_type.shape.dim[1].dim_value = 4


def merge(model: onnx.ModelProto) -> None:
    model.graph.input.append(
        helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    )


def ask_for_more(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [1]))


def rename_logits(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "scores"


def mix_forms(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "GroupQueryAttention")
    node.op_type = "Attention"


def past(model: onnx.ModelProto, kind: str, layer: int) -> onnx.ValueInfoProto:
    name = f"past_key_values.{layer}.{kind}"
    return next(value for value in model.graph.input if value.name == name)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (drop_past, "exported without a KV cache"),
        (turn_keys, r"\['batch_size', 2, 16, 'past'\]; a cache of \(rows, kv_heads, tokens"),
        (flatten_keys, r"a cache of \(rows, kv_heads, tokens"),
        (fix_rows, r"input_ids has the shape \[1, "),
        (change_type, "is of type bfloat16"),
        (widen_a_layer, "its layers store different things"),
        (merge, "merged decoder"),
        (ask_for_more, "inputs that the server does not know: pixels"),
        (rename_logits, "no output 'logits'"),
        (mix_forms, "layers of both forms"),
    ],
)
def test_graph_that_cannot_be_served_rightly_is_refused_with_the_reason(
    tiny_llama: TinyModel, tmp_path: Path, edit: Callable[[onnx.ModelProto], None], reason: str
) -> None:
    folder = copy_edited(tiny_llama.folder, tmp_path / "copy", edit)
    with pytest.raises(UnservableModel, match=reason):
        read_graph(folder)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_hidden_layers": 3}, "config.json says 3 layers, the graph has 2"),
        ({"num_key_value_heads": 4}, "says 4 KV heads, the graph has 2"),
        ({"head_dim": 32}, "says 32 as the width of a head, the graph has 16"),
        ({"head_dim": None, "hidden_size": 128}, "says 32 as the width of a head"),
        ({"vocab_size": 400}, "says 400 as the vocabulary's size, the graph has 331"),
    ],
)
def test_config_that_disagrees_with_the_graph_is_refused(
    tiny_llama: TinyModel, tmp_path: Path, changed: dict[str, object], reason: str
) -> None:
    folder = copy_of(tiny_llama.folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text()) | changed
    write(folder, config=config)
    with pytest.raises(UnservableModel, match=reason):
        read_graph(folder)


def test_one_report_lists_all_that_is_wrong(tiny_llama: TinyModel, tmp_path: Path) -> None:
    folder = copy_edited(tiny_llama.folder, tmp_path / "copy", ask_for_more)
    (folder / "model.onnx.data").unlink()
    with pytest.raises(UnservableModel) as raised:
        read_graph(folder)
    report = str(raised.value)
    assert "data file model.onnx.data is missing" in report
    assert "does not know: pixels" in report
    assert report.count("\n- ") == 2


def test_names_may_be_others(tiny_llama: TinyModel, tmp_path: Path) -> None:
    """As genai_config.json gives them; the answers stay the same."""

    def rename(model: onnx.ModelProto) -> None:
        for value in [*model.graph.input, *model.graph.output]:
            old, value.name = value.name, value.name.replace("past_key_values.", "old_")
            value.name = value.name.replace("input_ids", "tokens").replace("present.", "new_")
            for node in model.graph.node:
                node.input[:] = [value.name if name == old else name for name in node.input]
                node.output[:] = [value.name if name == old else name for name in node.output]

    folder = copy_edited(tiny_llama.folder, tmp_path / "copy", rename)
    inputs = {"input_ids": "tokens", "past_key_names": "old_%d.key"}
    inputs["past_value_names"] = "old_%d.value"
    outputs = {"present_key_names": "new_%d.key", "present_value_names": "new_%d.value"}
    decoder = {"inputs": inputs, "outputs": outputs}
    write(folder, genai_config={"model": {"decoder": decoder}})
    model = OnnxModel.load(folder, "cpu", num_threads=1)
    assert model.graph.past[0] == "old_0.key"
    ours = OnnxModel.load(tiny_llama.folder, "cpu", num_threads=1)
    np.testing.assert_array_equal(first_logits(model), first_logits(ours))


def first_logits(model: OnnxModel) -> NDArray[np.float32]:
    ids = ids_of_length(7)
    chunk = PrefillChunk(greedy("one", ids), 0, 0, ids)
    return model.forward(StepPlan([], chunk, []), cache_for(model)).copy()
