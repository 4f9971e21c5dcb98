"""What is wrong with a Triton model repository is found without a server."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from triton_lint import lint

LOGITS = """
name: "logits"
platform: "onnxruntime_onnx"
max_batch_size: 4
input [ { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ 1, 100 ] } ]
dynamic_batching { preferred_batch_size: [ 2, 4 ] }
"""
PIPE = """
name: "pipe"
platform: "ensemble"
max_batch_size: 4
input [ { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ 1, 100 ] } ]
ensemble_scheduling {
  step [ {
    model_name: "logits"
    model_version: -1
    input_map { key: "ids" value: "ids" }
    output_map { key: "logits" value: "logits" }
  } ]
}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, config in (("logits", LOGITS), ("pipe", PIPE)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    (tmp_path / "logits" / "1" / "model.onnx").touch()
    (tmp_path / "logits" / "configs").mkdir()
    (tmp_path / "logits" / "configs" / "cpu.pbtxt").write_text(LOGITS)
    return tmp_path


def edit(file: str, old: str, new: str) -> Callable[[Path], None]:
    def change(repository: Path) -> None:
        text = (repository / file).read_text()
        assert old in text
        (repository / file).write_text(text.replace(old, new))

    return change


LOGITS_FILE, CPU_FILE, PIPE_FILE = (
    "logits/config.pbtxt",
    "logits/configs/cpu.pbtxt",
    "pipe/config.pbtxt",
)


def test_a_repository_without_faults_has_no_problems(repository: Path) -> None:
    assert lint(repository) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (edit(LOGITS_FILE, "dims:", "dimensions:"), "has no field named"),
        (edit(LOGITS_FILE, '"logits"\nplatform', '"other"\nplatform'), "its folder's 'logits'"),
        (edit(LOGITS_FILE, "[ 2, 4 ]", "[ 2, 8 ]"), "a preferred batch of 8 is above the largest"),
        (edit(CPU_FILE, "[ 2, 4 ]", "[ 2, 8 ]"), "cpu.pbtxt: a preferred batch of 8"),
        (edit(LOGITS_FILE, "max_batch_size: 4", "max_batch_size: 1"), "dynamic batching, but"),
        (edit(LOGITS_FILE, 'platform: "onnxruntime_onnx"', ""), "neither platform nor backend"),
        (lambda path: (path / LOGITS_FILE).unlink(), "config.pbtxt: missing"),
        (lambda path: (path / "logits/1/model.onnx").unlink(), "version 1 has no model.onnx"),
        (
            edit(
                LOGITS_FILE,
                "dynamic",
                'model_warmup { inputs { key: "ids" value { input_data_file: "ids" } } }\ndynamic',
            ),
            "there is no warmup/ids",
        ),
        (lambda path: (path / "pipe/1").rmdir(), "there is no version folder"),
        (lambda path: shutil.rmtree(path / "logits"), "there is no model 'logits'"),
        (edit(PIPE_FILE, 'key: "ids"', 'key: "id"'), "logits has no input 'id'"),
        (edit(PIPE_FILE, 'key: "ids"', 'key: "id"'), "logits is not given its input 'ids'"),
        (edit(PIPE_FILE, 'key: "logits"', 'key: "text"'), "logits has no output 'text'"),
        (edit(PIPE_FILE, 'value: "ids"', 'value: "tokens"'), "nothing gives 'tokens' to logits"),
        (edit(PIPE_FILE, "TYPE_INT64", "TYPE_INT32"), "but is given ('TYPE_INT32', [-1])"),
        (edit(PIPE_FILE, "1, 100", "1, 32064"), "its output 'logits' is ('TYPE_FP32', [1, 32064])"),
    ],
)
def test_a_fault_is_told(repository: Path, change: Callable[[Path], None], told: str) -> None:
    change(repository)
    problems = lint(repository)
    assert any(told in problem for problem in problems), problems


def test_a_folder_without_models_is_told(tmp_path: Path) -> None:
    assert lint(tmp_path) == [f"{tmp_path}: no model in it"]
