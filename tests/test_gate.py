"""The gate: its measures against torch, what it refuses, and what it writes down."""

from __future__ import annotations

import json
import math
import shutil
import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from quantize import MODEL_FILE
from quantize.compare import NUM_ROWS, TEXTS, compare, gate_ids
from quantize.decoding import Decoding
from quantize.floor import Floor, Quality, QualityTooLow
from quantize.gate import Gate
from quantize.speed import measure

from .commands import run_quantize
from .conftest import Build, TinyModel
from .live import ROOT
from .tiny_tokenizers import byte_level_tokenizer

IDS = np.random.default_rng(3).integers(0, 260, (4, 30))
GOOD = Quality(4000, 10.1, 10.0, mean_kl=0.01, top1_agreement=0.97)


@pytest.fixture(scope="module")
def int8(tiny_llama: TinyModel, build_folder: Build) -> Path:
    return build_folder(tiny_llama.source, "int8")


@pytest.fixture(scope="module")
def spoiled(int8: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the int8 folder with the scales of one matrix three times as large."""
    folder = tmp_path_factory.mktemp("spoiled") / "folder"
    shutil.copytree(int8, folder)
    spoil(folder)
    return folder


def spoil(folder: Path, factor: float = 3.0) -> None:
    model = onnx.load(folder / MODEL_FILE)
    [scales] = [t for t in model.graph.initializer if "layers.1.mlp.down_proj" in t.name][1:2]
    assert scales.name.endswith("scales")
    scales.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scales) * factor, scales.name))
    (folder / f"{MODEL_FILE}.data").unlink()
    onnx.save(model, folder / MODEL_FILE, save_as_external_data=True, location="model.onnx.data")


def test_identical_copy_agrees_everywhere(tiny_llama: TinyModel, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_llama.folder, tmp_path / "copy")
    quality = compare(tiny_llama.folder, copy, IDS)
    assert (quality.top1_agreement, quality.mean_kl) == (1.0, 0.0)
    assert quality.perplexity_ratio == 1.0


def test_perplexity_is_that_of_torch(tiny_llama: TinyModel, int8: Path) -> None:
    quality = compare(tiny_llama.folder, int8, IDS)
    losses = [
        torch.nn.functional.cross_entropy(
            tiny_llama.reference.logits(row)[:-1], torch.tensor(row[1:])
        )
        for row in IDS.tolist()
    ]
    expected = math.exp(sum(float(loss) for loss in losses) / len(losses))
    assert quality.reference_perplexity == pytest.approx(expected, rel=1e-4)
    assert quality.num_tokens == 4 * 29


def test_int8_differs_a_little_and_passes(tiny_llama: TinyModel, int8: Path) -> None:
    quality = compare(tiny_llama.folder, int8, IDS)
    assert 0 < quality.mean_kl < 0.01
    assert Floor().shortfalls(quality) == []


def test_one_spoiled_matrix_is_found(tiny_llama: TinyModel, spoiled: Path) -> None:
    assert Floor().shortfalls(compare(tiny_llama.folder, spoiled, IDS))


def test_graph_that_is_beyond_measure_falls_short_and_does_not_raise(
    tiny_llama: TinyModel, int8: Path, tmp_path: Path
) -> None:
    wild = shutil.copytree(int8, tmp_path / "wild")
    spoil(wild, factor=1e30)
    assert Floor().shortfalls(compare(tiny_llama.folder, wild, IDS))


@pytest.mark.parametrize("num_tokens", [4, 16, 64])
def test_speed_of_a_short_context_is_measured(int8: Path, num_tokens: int) -> None:
    assert all(value > 0 for value in measure(int8, num_tokens).values())


def test_only_one_session_is_alive_while_memory_is_measured(
    int8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Decoding] = weakref.WeakSet()
    most: list[int] = []

    class Counted(Decoding):
        def __init__(self, folder: Path, rows: int, max_len: int) -> None:
            alive.add(self)
            most.append(len(alive))
            super().__init__(folder, rows, max_len)

    monkeypatch.setattr("quantize.speed.Decoding", Counted)
    measure(int8, 16)
    assert most == [1, 1, 1]


@pytest.mark.parametrize(
    ("quality", "names"),
    [
        (GOOD, []),
        (Quality(4000, 10.0, 10.0, 0.05, 0.93), []),
        (Quality(4000, 10.0, 10.0, 0.0501, 0.97), ["mean KL"]),
        (Quality(4000, 10.0, 10.0, 0.01, 0.92), ["top-1 agreement"]),
        (Quality(4000, 10.4, 10.0, 0.01, 0.97), ["perplexity ratio"]),
        (
            Quality(4000, math.nan, 10.0, math.nan, 0.0),
            ["mean KL", "top-1 agreement", "perplexity ratio"],
        ),
    ],
    ids=["good", "at the floor", "kl", "agreement", "perplexity", "not a number"],
)
def test_each_measure_has_its_floor(quality: Quality, names: list[str]) -> None:
    shortfalls = Floor().shortfalls(quality)
    assert len(shortfalls) == len(names)
    assert all(text.startswith(name) for text, name in zip(shortfalls, names, strict=True))


def test_gate_refuses_with_each_measure_and_its_limit(tiny_llama: TinyModel, spoiled: Path) -> None:
    with pytest.raises(QualityTooLow, match=r"mean KL .* at most 0\.05 is wanted"):
        Gate(Floor()).judge(tiny_llama.source, tiny_llama.folder, spoiled)


def test_allowed_loss_is_written_down(tiny_llama: TinyModel, spoiled: Path) -> None:
    gate = Gate(Floor(), allow_quality_loss=True)
    found = gate.judge(tiny_llama.source, tiny_llama.folder, spoiled)
    assert found["shortfalls"]
    assert found["quality"]["mean_kl"] > found["floor"]["max_mean_kl"]


def test_below_the_floor_nothing_is_published(tiny_llama: TinyModel, tmp_path: Path) -> None:
    """No rounded weight gives the very same answers."""
    output = tmp_path / "out" / "tiny"
    result = run_quantize(str(tiny_llama.source), "--output", str(output), "--max-kl", "0")
    assert result.exit_code == 2
    assert "mean KL" in result.stderr
    assert {path.name for path in output.parent.iterdir()} == {".cache"}


def test_command_prints_the_table_and_records_it(tiny_llama: TinyModel, tmp_path: Path) -> None:
    output = tmp_path / "tiny"
    result = run_quantize(str(tiny_llama.source), "--output", str(output))
    assert result.exit_code == 0, result.output
    for title in ("on disk, MB", "peak memory, MB", "prefill, tokens/s", "perplexity", "mean KL"):
        assert title in result.stdout
    gate = json.loads((output / "quantization.json").read_text())["gate"]
    sizes = [file.stat().st_size for file in output.glob("model.onnx*")]
    assert gate["measured"]["quantized"]["bytes"] == sum(sizes)
    assert gate["measured"]["quantized"]["bytes"] < gate["measured"]["reference"]["bytes"]
    for measured in gate["measured"].values():
        assert all(value > 0 for value in measured.values())
    assert gate["shortfalls"] == []


def test_rows_are_parts_of_the_shipped_text_in_order() -> None:
    tokenizer = byte_level_tokenizer()
    ids = gate_ids(tokenizer, 50)
    assert ids.shape == (NUM_ROWS, 50)
    texts = "".join(path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.txt")))
    assert tokenizer.decode(ids[0]) == texts[: len(tokenizer.decode(ids[0]))]


@pytest.mark.slow
def test_text_has_four_thousand_tokens_for_the_default_model() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "default")
    assert gate_ids(tokenizer, 256).size >= 4000
