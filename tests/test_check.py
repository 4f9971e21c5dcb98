"""`python -m quantize check`: a good folder passes; of a bad one the report says what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from quantize import MODEL_FILE
from quantize.check import check_folder
from quantize.check_graph import check_placement
from quantize.graph_facts import graph_facts
from quantize.model_folder import ModelFolder
from quantize.report import Level, Report

from .commands import run_quantize
from .conftest import Bring, TinyModel
from .edits import (
    DATA_FILE,
    copy_with_hashes,
    edit_graph,
    edit_json,
    relocate,
    to_genai_layout,
    truncate,
)
from .folders import make_genai, make_portable
from .tiny import CONTEXT, VOCAB


@pytest.fixture
def folder(tiny_phi3: TinyModel, tmp_path: Path) -> Path:
    return copy_with_hashes(tiny_phi3.folder, tmp_path / "folder")


def told(report: Report, level: Level) -> list[str]:
    return [f"{f.about}: {f.text}" for f in report.findings if f.level == level]


def only_error(folder: Path) -> str:
    """The text of the single error that a fast check finds."""
    [error] = told(check_folder(folder, fast=True), "error")
    return error


def test_whole_folder_passes_with_a_session_really_made(tiny: TinyModel, tmp_path: Path) -> None:
    folder = copy_with_hashes(tiny.folder, tmp_path / "folder")
    report = check_folder(folder)
    assert told(report, "error") == []
    [session] = [line for line in told(report, "ok") if line.startswith("session")]
    assert "CPUExecutionProvider" in session
    assert "2 GroupQueryAttention" in session


def test_folder_of_todays_quantize_lacks_only_its_hashes(tiny: TinyModel) -> None:
    report = check_folder(tiny.folder)
    assert told(report, "error") == []
    assert [line for line in told(report, "warning") if not line.startswith("hashes:")] == []


@pytest.mark.parametrize(
    ("maker", "form"), [(make_portable, "portable form"), (make_genai, "fused form")]
)
def test_folder_of_another_tool_passes(
    maker: Callable[..., Path], form: str, tiny: TinyModel, bring: Bring
) -> None:
    """The builder's has no config.json."""
    report = check_folder(bring(maker, tiny.source))
    assert told(report, "error") == []
    assert any(form in line for line in told(report, "ok"))


def test_folder_moved_whole_still_passes_and_loads(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "mine"
    shutil.move(folder, moved)
    report = check_folder(moved)
    assert told(report, "error") == []
    assert any(line.startswith("session") for line in told(report, "ok"))


def delete(data: Path) -> None:
    data.unlink()


def rename(data: Path) -> None:
    data.rename(data.with_name("model.onnx_data"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [(delete, "is missing"), (truncate, "is cut short"), (rename, "was it renamed?")],
)
def test_data_file_that_is_not_whole_is_named(
    damage: Callable[[Path], None], says: str, folder: Path
) -> None:
    damage(folder / DATA_FILE)
    error = only_error(folder)
    assert error.startswith(f"weights: data file {DATA_FILE} is")
    assert says in error
    assert run_quantize("check", str(folder), "--fast").exit_code == 1


@pytest.mark.parametrize("location", ["../outside.data", "/tmp/outside.data"])
def test_data_file_outside_the_folder_is_refused(location: str, folder: Path) -> None:
    edit_json(folder / "quantization.json", files=None)
    edit_graph(folder, lambda model: relocate(model, location))
    shutil.copyfile(folder / DATA_FILE, folder.parent / "outside.data")
    assert f"{location} lies outside of the folder" in only_error(folder)


def test_link_to_outside_the_folder_is_a_warning(folder: Path) -> None:
    shutil.move(folder / DATA_FILE, folder.parent / "blob")
    (folder / DATA_FILE).symlink_to(folder.parent / "blob")
    report = check_folder(folder, fast=True)
    assert told(report, "error") == []
    assert any("link to outside of the folder" in line for line in told(report, "warning"))


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        [byte] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_one_flipped_byte_is_found_by_the_hash_alone(folder: Path) -> None:
    flip_a_byte(folder / DATA_FILE)
    assert told(check_folder(folder, fast=True), "error") == []
    [error] = told(check_folder(folder), "error")
    assert f"{DATA_FILE} is not what was written" in error


def test_edited_small_file_is_found_by_its_size(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert "chat_template.jinja has" in only_error(folder)


@pytest.mark.parametrize("entry", ["abc", {"bytes": "7", "sha256": ""}, {"bytes": 7}], ids=str)
def test_unusable_entry_of_the_table_is_an_error(entry: object, folder: Path) -> None:
    edit_json(folder / "quantization.json", files={MODEL_FILE: entry})
    assert only_error(folder) == f"hashes: quantization.json says nothing usable of {MODEL_FILE}"


def test_file_of_the_table_that_is_gone_is_named(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert only_error(folder).startswith("hashes: generation_config.json is missing")


def test_folder_without_hashes_is_a_warning(folder: Path) -> None:
    edit_json(folder / "quantization.json", files=None)
    report = check_folder(folder, fast=True)
    assert told(report, "error") == []
    assert any("quantization.json has no hashes" in line for line in told(report, "warning"))


def test_file_that_nothing_refers_to_is_a_warning(folder: Path) -> None:
    (folder / "model_old.onnx.data").write_bytes(b"old")
    warnings = told(check_folder(folder, fast=True), "warning")
    assert any("model_old.onnx.data belongs to nothing" in line for line in warnings)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_hidden_layers": 3}, "config.json says 3 for layers, the graph 2"),
        ({"num_key_value_heads": 4}, "config.json says 4 for KV heads, the graph 2"),
        ({"vocab_size": 32064}, f"config.json says 32064 for vocabulary, the graph {VOCAB}"),
        ({"sliding_window": 32}, "local_window_size -1, config.json asks for 32"),
        ({"max_position_embeddings": 2 * CONTEXT}, "rotary table"),
        ({"model_type": "nope"}, "config.json cannot be used"),
    ],
    ids=["layers", "KV heads", "vocabulary", "window", "context", "unknown model type"],
)
def test_config_of_another_model_is_an_error(
    fields: dict[str, object], says: str, folder: Path
) -> None:
    edit_json(folder / "quantization.json", files=None)
    edit_json(folder / "config.json", **fields)
    assert says in only_error(folder)


def test_window_as_wide_as_the_context_needs_no_window_in_the_graph(folder: Path) -> None:
    edit_json(folder / "quantization.json", files=None)
    edit_json(folder / "config.json", sliding_window=CONTEXT)
    assert told(check_folder(folder, fast=True), "error") == []


def set_windows(model: onnx.ModelProto, window: int) -> None:
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            [present] = [a for a in node.attribute if a.name == "local_window_size"]
            present.i = window


def test_window_that_hugging_face_does_not_have_is_an_error(folder: Path) -> None:
    edit_json(folder / "quantization.json", files=None)
    edit_graph(folder, lambda model: set_windows(model, 32))
    assert "layer 0 has local_window_size 32, config.json asks for -1" in only_error(folder)
    edit_json(folder / "config.json", sliding_window=32)
    assert told(check_folder(folder, fast=True), "error") == []


def test_window_that_differs_in_a_folder_of_another_tool_is_a_warning(folder: Path) -> None:
    """It is served all the same."""
    (folder / "quantization.json").unlink()
    edit_json(folder / "config.json", sliding_window=32)
    report = check_folder(folder, fast=True)
    assert told(report, "error") == []
    [warning] = [line for line in told(report, "warning") if line.startswith("window:")]
    assert "local_window_size -1, config.json asks for 32" in warning


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"no protobuf at all \xff", "is not an ONNX graph"), (b"", "holds no graph")],
    ids=["garbage", "empty"],
)
def test_graph_that_is_none_is_named(content: bytes, says: str, folder: Path) -> None:
    edit_json(folder / "quantization.json", files=None)
    (folder / MODEL_FILE).write_bytes(content)
    assert only_error(folder).startswith(f"graph: {folder / MODEL_FILE} {says}")


def test_broken_record_is_named_once(folder: Path) -> None:
    (folder / "quantization.json").write_text('{"files": ')
    assert "quantization.json is not valid JSON" in only_error(folder)


def test_hugging_face_folder_without_a_graph_is_told_so(tiny_phi3: TinyModel) -> None:
    [error] = told(check_folder(tiny_phi3.source, fast=True), "error")
    assert error == f"graph: {MODEL_FILE} is missing, and there is no other .onnx file"


def test_two_graphs_of_which_none_has_our_name_are_told(folder: Path) -> None:
    edit_json(folder / "quantization.json", files=None)
    (folder / MODEL_FILE).rename(folder / "decoder_model.onnx")
    shutil.copyfile(folder / "decoder_model.onnx", folder / "decoder_with_past_model.onnx")
    error = only_error(folder)
    assert "decoder_model.onnx, decoder_with_past_model.onnx" in error


def drop_cache(model: onnx.ModelProto) -> None:
    inputs = [v for v in model.graph.input if "past" not in v.name]
    outputs = [v for v in model.graph.output if "present" not in v.name]
    for field, values in ((model.graph.input, inputs), (model.graph.output, outputs)):
        del field[:]
        field.extend(values)


def add_unknown_input(model: onnx.ModelProto) -> None:
    value = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    model.graph.input.append(value)


def raise_opset(model: onnx.ModelProto) -> None:
    for opset in model.opset_import:
        opset.version = 99 if opset.domain == "" else opset.version


def add_unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Teleport", ["x"], ["y"], domain="mine"))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (drop_cache, "exported without a KV cache"),
        (add_unknown_input, "feed its inputs use_cache_branch"),
        (raise_opset, "opset 99 of ai.onnx is newer"),
        (add_unknown_operator, "does not know mine.Teleport"),
    ],
)
def test_graph_that_cannot_be_served_is_an_error(
    edit: Callable[[onnx.ModelProto], None], says: str, folder: Path
) -> None:
    edit_json(folder / "quantization.json", files=None)
    edit_graph(folder, edit)
    errors = told(check_folder(folder, fast=True), "error")
    assert any(says in error for error in errors)


def make_portable(model: onnx.ModelProto) -> None:
    """As far as a fast check looks: another attention, and positions as an input."""
    for node in model.graph.node:
        node.op_type = node.op_type.replace("GroupQueryAttention", "MultiHeadAttention")
    positions = helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["rows", "tokens"])
    model.graph.input.append(positions)


def test_portable_form_passes_and_its_window_cannot_be_told(folder: Path) -> None:
    edit_json(folder / "quantization.json", form="portable", files=None)
    edit_json(folder / "config.json", sliding_window=32)
    edit_graph(folder, make_portable)
    report = check_folder(folder, fast=True)
    assert told(report, "error") == []
    assert any("portable form, 2 layers" in line for line in told(report, "ok"))
    assert any(line.startswith("window: config.json has") for line in told(report, "warning"))


def test_form_that_the_record_does_not_tell_is_an_error(folder: Path) -> None:
    edit_json(folder / "quantization.json", form="portable", files=None)
    assert "calls it portable, but it is fused" in only_error(folder)


def test_graph_that_onnxruntime_refuses_is_an_error(folder: Path) -> None:
    """Everything fits, but a node asks for a value that nobody makes."""
    edit_json(folder / "quantization.json", files=None)
    edit_graph(folder, lambda model: model.graph.node[-1].input.__setitem__(0, "nobody"))
    [error] = told(check_folder(folder), "error")
    assert error.startswith("session: CPUExecutionProvider cannot load the graph")


def test_genai_layout_passes_and_its_own_numbers_are_compared(folder: Path) -> None:
    to_genai_layout(folder)
    report = check_folder(folder)
    assert told(report, "error") == []
    assert any("genai_config.json fits the graph" in line for line in told(report, "ok"))
    genai = json.loads((folder / "genai_config.json").read_text())
    genai["model"]["decoder"]["num_hidden_layers"] = 32
    edit_json(folder / "genai_config.json", **genai)
    assert "genai_config.json says 32 for layers, the graph 2" in only_error(folder)


def test_graph_that_genai_config_names_is_missed(folder: Path) -> None:
    to_genai_layout(folder, "phi.onnx")
    (folder / "phi.onnx").rename(folder / "phi3.onnx")
    assert only_error(folder) == "graph: phi.onnx is missing: genai_config.json names it"


def test_graph_of_our_name_is_taken_before_the_one_that_genai_config_names(folder: Path) -> None:
    """As the server does."""
    edit_json(folder / "genai_config.json", model={"decoder": {"filename": "phi.onnx"}})
    (folder / "phi.onnx").touch()
    assert told(check_folder(folder, fast=True), "error") == []


@pytest.mark.parametrize("name", ["../phi.onnx", 7], ids=str)
def test_graph_that_genai_config_names_by_no_name_is_an_error(name: object, folder: Path) -> None:
    to_genai_layout(folder, "phi.onnx")
    edit_json(folder / "genai_config.json", model={"decoder": {"filename": name}})
    assert "no file's name" in only_error(folder)


def test_folder_without_any_config_is_an_error(folder: Path) -> None:
    edit_json(folder / "quantization.json", files=None)
    (folder / "config.json").unlink()
    assert "nothing says what the model is" in "; ".join(
        told(check_folder(folder, fast=True), "error")
    )


def placement(*operators: str, **record: str) -> list[tuple[str, str]]:
    """(level, text) about CUDA for a graph with these operators."""
    nodes = [helper.make_node(name, ["x"], [f"y{i}"]) for i, name in enumerate(operators)]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    model = helper.make_model(helper.make_graph(nodes, "graph", [value], []))
    report = Report()
    folder = ModelFolder(Path(), None, None, {}, {}, dict(record))
    check_placement(model, graph_facts(model), folder, report)
    return [(f.level, f.text) for f in report.findings if f.about == "cuda"]


def test_integer_operators_are_flagged_as_falling_back_to_the_cpu() -> None:
    [(level, text)] = placement("DynamicQuantizeLinear", "MatMulInteger", "MatMulInteger", "Mul")
    assert level == "warning"
    assert "1 DynamicQuantizeLinear, 2 MatMulInteger" in text
    assert "Mul," not in text


def test_folder_made_for_the_cpu_is_not_warned_of_cuda() -> None:
    [(level, text)] = placement("MatMulInteger", device="cpu")
    assert (level, "1 MatMulInteger" in text) == ("ok", True)


def test_weight_only_graph_falls_back_nowhere() -> None:
    [(level, _)] = placement("MatMulNBits", "Mul")
    assert level == "ok"


def test_longrope_tables_inside_the_branches_are_measured() -> None:
    """The builder writes one table per set of factors, as a constant in each branch of an If."""

    def branch(length: int) -> onnx.GraphProto:
        table = helper.make_tensor("table", TensorProto.FLOAT, [length, 2], [0.0] * 2 * length)
        return helper.make_graph(
            [helper.make_node("Constant", [], ["c"], value=table)], "b", [], []
        )

    nodes = [
        helper.make_node(
            "If", ["x"], ["cos_cache"], then_branch=branch(64), else_branch=branch(16)
        ),
        helper.make_node("GroupQueryAttention", [*["x"] * 7, "cos_cache"], ["y"]),
    ]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    model = helper.make_model(helper.make_graph(nodes, "graph", [value], []))
    assert graph_facts(model).cos_cache_length == 64


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["--slow", "."]], ids=str)
def test_wrong_use_is_status_2(arguments: list[str]) -> None:
    assert run_quantize("check", *arguments).exit_code == 2


def test_file_in_place_of_a_folder_is_status_2(folder: Path) -> None:
    assert run_quantize("check", str(folder / MODEL_FILE)).exit_code == 2


def test_json_holds_the_same_report(folder: Path) -> None:
    (folder / DATA_FILE).unlink()
    result = run_quantize("check", str(folder), "--fast", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["errors"] == 1
    [error] = [f for f in report["findings"] if f["level"] == "error"]
    assert (error["about"], error["file"]) == ("weights", DATA_FILE)


def test_good_folder_is_status_0_and_ends_with_a_summary(folder: Path) -> None:
    result = run_quantize("check", str(folder), "--fast")
    assert result.exit_code == 0
    assert "0 errors" in result.stdout.splitlines()[-1]


def test_help_tells_of_both_commands() -> None:
    shown = run_quantize("--help").output
    assert "python -m quantize [OPTIONS] MODEL" in shown
    assert "python -m quantize check [OPTIONS] FOLDER" in shown
    assert "--fast" in run_quantize("check", "--help").output
