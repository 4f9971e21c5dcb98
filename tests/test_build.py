"""From the command line to answers: folders of every precision are whole, checked and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from safetensors.torch import load_file, save_file

from app.bridge import State
from quantize import MODEL_FILE, gate
from quantize.check import check_folder
from quantize.errors import QuantizeError

from .commands import run_quantize
from .conftest import Build, Named, TinyModel
from .edits import copy_of
from .engines import greedy, loaded_service, real_engine, run
from .logits import ids_of_length
from .test_gate import spoil, without_speed  # noqa: F401  a fixture
from .tiny import make_llama, make_phi3

CHECKED = [("fp32", "cpu"), ("int8", "cpu"), ("int4", "cpu"), ("int8-dynamic", "cpu")]
CHECKED += [("fp16", "cuda"), ("int8", "cuda"), ("int4", "cuda")]
NEAR_TIES = ["--min-top1", "0.65"]  # of random models


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "quantization.json").read_text())
    return record


@pytest.mark.parametrize(("precision", "device"), CHECKED)
def test_fresh_folder_has_neither_errors_nor_warnings(
    precision: str, device: str, tiny_llama: TinyModel, built: Build
) -> None:
    report = check_folder(built(tiny_llama.source, precision, device))
    assert [line for line in report.lines() if not line.startswith("ok")] == []


@pytest.mark.usefixtures("without_speed")
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma"])
def test_model_of_another_kind_passes_the_gate_is_whole_and_served(
    name: str,
    precision: str,
    family_source: Named,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "_WINDOW", 40)  # a portable graph copies its cache at every token
    output = tmp_path / "folder"
    arguments = [str(family_source(name)), "--output", str(output), "--precision", precision]
    result = run_quantize(*arguments, *NEAR_TIES)
    assert result.exit_code == 0, result.output
    assert record_of(output)["gate"]["shortfalls"] == []
    assert check_folder(output, fast=True).count("error") == 0
    prompts = [ids_of_length(length) for length in (3, 19, 30)]
    alone = [answers(output, [prompt])[0] for prompt in prompts]
    assert answers(output, prompts) == alone
    assert len({tuple(answer) for answer in alone}) == 3


def answers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    engine = real_engine(folder, max_model_len=64)
    sequences = [greedy(str(index), prompt) for index, prompt in enumerate(prompts)]
    for sequence in sequences:
        engine.submit(sequence)
    run(engine)
    return [sequence.output_ids for sequence in sequences]


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4", "int8-dynamic"])
def test_probe_that_was_written_passes_where_it_was_written(
    precision: str, tiny_phi3: TinyModel, built: Build
) -> None:
    service = loaded_service(built(tiny_phi3.source, precision))
    assert service.bridge.failure is None
    assert service.current.loaded is not None
    assert service.current.loaded.info["probe"] == "passed"


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_probe_that_was_written_finds_a_matrix_three_times_too_large(
    precision: str, tiny_phi3: TinyModel, built: Build, tmp_path: Path
) -> None:
    folder = copy_of(built(tiny_phi3.source, precision), tmp_path / "folder")
    spoil(folder)
    service = loaded_service(folder)
    assert service.bridge.state is State.FAILED
    assert "computes other numbers" in str(service.bridge.failure)


def test_probe_is_no_longer_than_the_context(build_folder: Build, family_source: Named) -> None:
    """Of 32 tokens, of which the probe takes 24; and of 16."""
    source = copy_of(family_source("llama"), family_source("llama").parent / "short")
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 16}
    (source / "config.json").write_text(json.dumps(config))
    probe = record_of(build_folder(source, "int8"))["probe"]
    assert len(probe["token_ids"]) == 16
    assert len(probe["top_ids"]) == len(set(probe["top_ids"])) == 8
    assert probe["top_logits"] == sorted(probe["top_logits"], reverse=True)


def test_record_says_what_was_done_and_why(tiny_llama: TinyModel, built: Build) -> None:
    record = record_of(folder := built(tiny_llama.source, "int8"))
    assert (record["precision"], record["device"], record["form"]) == ("int8", "cpu", "fused")
    assert record["reason"] == "as asked for"
    done = record["quantization"]
    assert (done["operator"], done["matrices"]) == ("MatMulIntegerToFloat", 11)
    assert (done["bits"], done["rotated"], done["reduce_range"]) == (8, "yes", False)
    files = {path.name for path in folder.iterdir()} - {"quantization.json"}
    assert record["files"].keys() == files >= {MODEL_FILE, f"{MODEL_FILE}.data", "config.json"}
    assert record["files"][MODEL_FILE]["bytes"] == (folder / MODEL_FILE).stat().st_size


def test_float_graph_has_neither_quantization_nor_gate(tiny_llama: TinyModel) -> None:
    record = record_of(tiny_llama.folder)
    assert not {"quantization", "gate"} & record.keys()


def test_graph_for_cuda_has_no_probe(tiny_llama: TinyModel, built: Build) -> None:
    """Its numbers are the GPU's."""
    assert "probe" not in record_of(built(tiny_llama.source, "fp16", "cuda"))


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_portable_graph_for_cuda_is_refused_with_what_can_be_had(
    precision: str, family_source: Named, build_folder: Build
) -> None:
    says = f"exported in fp32 only: {precision} for cuda cannot be had; int8, int4 and fp32 for"
    with pytest.raises(QuantizeError, match=says):
        build_folder(family_source("gpt2"), precision, "cuda")


@pytest.mark.parametrize("precision", ["int8", "int8-dynamic"])
def test_reduced_range_comes_through_the_command_line(
    precision: str, tiny_llama: TinyModel, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "folder"
    arguments = [str(tiny_llama.source), "--output", str(output), "--precision", precision]
    result = run_quantize(*arguments, "--reduce-range", "--max-kl", "0")
    assert result.exit_code == 2
    is_allowed = precision == "int8"
    assert ("mean KL" in result.stderr) is is_allowed
    assert ("--reduce-range is for int8" in result.stderr) is not is_allowed


def test_window_that_a_graph_lacks_is_put_in(build_folder: Build, tmp_path: Path) -> None:
    """An export by the same builder, whose window was left out."""
    source = make_phi3(tmp_path / "phi3", sliding_window=16)
    exported = copy_of(build_folder(source, "fp32"), tmp_path)
    (exported / "quantization.json").unlink()
    path = exported / MODEL_FILE
    model = onnx.load(path, load_external_data=False)
    for attribute in (a for n in model.graph.node for a in n.attribute):
        if attribute.name == "local_window_size":
            attribute.i = -1
    path.write_bytes(model.SerializeToString())
    output = tmp_path / "out"
    run_quantize(str(exported), "--output", str(output), "--precision", "fp32")
    nodes = onnx.load(output / MODEL_FILE, load_external_data=False).graph.node
    windows = [a.i for n in nodes for a in n.attribute if a.name == "local_window_size"]
    assert windows == [16, 16]


@pytest.mark.parametrize("option", [["--max-kl", "0.1"], ["--allow-quality-loss"]], ids=str)
def test_limits_of_a_gate_that_is_not_passed_are_refused(
    option: list[str], tiny_llama: TinyModel, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    arguments = [str(tiny_llama.source), "--output", str(output), "--precision", "fp32"]
    result = run_quantize(*arguments, *option)
    assert (result.exit_code, output.exists()) == (2, False)
    assert "passes no gate" in result.stderr


def test_model_that_overflows_in_fp16_is_refused(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 1e6
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    output = tmp_path / "out"
    arguments = [str(source), "--output", str(output), "--precision", "fp16", "--device", "cuda"]
    result = run_quantize(*arguments)
    assert (result.exit_code, output.exists()) == (2, False)
    assert "in fp16 the model gives NaN or infinite logits" in result.stderr
