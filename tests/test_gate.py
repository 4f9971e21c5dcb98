"""The gate: its measures against torch, what it refuses, and what it writes down."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file

from quantize import MODEL_FILE, gate
from quantize.compare import NUM_ROWS, TEXTS, compare, gate_ids
from quantize.decoding import Decoding
from quantize.dynamic import Dynamic
from quantize.floor import INT4_FLOOR, INT8_FLOOR, Floor, Quality, QualityTooLow
from quantize.gate import Gate
from quantize.per_token import PerToken
from quantize.rewrite import rewrite
from quantize.sources import Source
from quantize.speed import measure
from quantize.weight_only import WeightOnly

from .commands import run_quantize
from .conftest import Build, TinyModel
from .live import ROOT
from .tiny import make_llama
from .tiny_tokenizers import byte_level_tokenizer

# Of 464 tokens: on fewer, a near tie of a random model's first two tokens counts for much.
IDS = gate_ids(byte_level_tokenizer(), 30)
GOOD = Quality(4000, 10.1, 10.0, mean_kl=0.01, top1_agreement=0.97)


@pytest.fixture(scope="module")
def int8(tiny_llama: TinyModel, built: Build) -> Path:
    return built(tiny_llama.source, "int8")


@pytest.fixture(scope="module")
def spoiled(int8: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the int8 folder with one matrix three times as large."""
    folder = tmp_path_factory.mktemp("spoiled") / "folder"
    shutil.copytree(int8, folder)
    spoil(folder)
    return folder


def spoil(folder: Path, factor: float = 3.0) -> None:
    """Multiplies the scales of the second layer's down projection."""
    model = onnx.load(folder / MODEL_FILE)
    [scales] = [t for t in model.graph.initializer if re.search(r"\.1\.mlp\.down.*/scale", t.name)]
    scales.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scales) * factor, scales.name))
    (folder / f"{MODEL_FILE}.data").unlink()
    onnx.save(model, folder / MODEL_FILE, save_as_external_data=True, location="model.onnx.data")


def source_of(model: TinyModel) -> Source:
    return Source(model.source, "tiny", "tiny")


@pytest.fixture
def without_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It only informs, and takes seconds."""
    monkeypatch.setattr("quantize.speed.measure_in_turns", lambda folders, num_tokens: {})


def test_logits_stay_good_when_the_session_is_gone(tiny_llama: TinyModel) -> None:
    kept = Decoding(tiny_llama.folder, 1, 8)
    expected = kept.feed(IDS[:1, :8])
    gone = [Decoding(tiny_llama.folder, 1, 8).feed(IDS[:1, :8]) for _ in range(3)]
    for logits in gone:
        np.testing.assert_array_equal(logits, expected)


def test_identical_copy_agrees_everywhere(tiny_llama: TinyModel, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_llama.folder, tmp_path / "copy")
    quality = compare(tiny_llama.folder, copy, IDS)
    assert quality.top1_agreement == 1
    # One reads all at once, the other token by token.
    assert abs(quality.mean_kl) < 1e-6
    assert quality.perplexity_ratio == pytest.approx(1, abs=1e-5)


def test_share_of_the_work_is_told_as_it_goes_on(tiny_llama: TinyModel, int8: Path) -> None:
    shares: list[float] = []
    compare(tiny_llama.folder, int8, IDS, shares.append)
    assert shares == sorted(shares)
    assert len(shares) >= 30  # as many as there are tokens in a row
    assert 0 < shares[0] < shares[-1] == 1


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
    assert quality.num_tokens == NUM_ROWS * 29


def test_int8_differs_a_little_and_passes(tiny_llama: TinyModel, int8: Path) -> None:
    quality = compare(tiny_llama.folder, int8, IDS)
    assert 0 < quality.mean_kl < 0.01
    assert INT8_FLOOR.shortfalls(quality) == []


def test_one_spoiled_matrix_is_found(tiny_llama: TinyModel, spoiled: Path) -> None:
    assert INT8_FLOOR.shortfalls(compare(tiny_llama.folder, spoiled, IDS))


def test_graph_that_is_beyond_measure_falls_short_and_does_not_raise(
    tiny_llama: TinyModel, int8: Path, tmp_path: Path
) -> None:
    wild = shutil.copytree(int8, tmp_path / "wild")
    spoil(wild, factor=1e30)
    assert INT8_FLOOR.shortfalls(compare(tiny_llama.folder, wild, IDS))


@pytest.fixture(scope="module")
def with_outlier(build_folder: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In front of every MLP, one channel is 100 times as large as the others (FR10)."""
    source = make_llama(tmp_path_factory.mktemp("outlier"))
    weights = load_file(source / "model.safetensors")
    for layer in (0, 1):
        weights[f"model.layers.{layer}.post_attention_layernorm.weight"][9] *= 100
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    return build_folder(source, "fp32")


@pytest.mark.parametrize(
    ("method", "passes"), [(Dynamic, False), (PerToken, True), (WeightOnly, True)]
)
def test_one_channel_that_sticks_out_fails_with_one_scale_for_all_and_passes_else(
    method: Any, passes: bool, with_outlier: Path, tmp_path: Path
) -> None:
    rewrite(with_outlier, tmp_path, method)
    quality = compare(with_outlier, tmp_path, IDS)
    # The first two tokens of a random model are closer than a trained one's.
    floor = INT8_FLOOR.moved(None, 0.9, None)
    assert (floor.shortfalls(quality) == []) is passes, quality


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
    shortfalls = INT8_FLOOR.shortfalls(quality)
    assert len(shortfalls) == len(names)
    assert all(text.startswith(name) for text, name in zip(shortfalls, names, strict=True))


def test_gate_refuses_with_each_measure_and_its_limit(tiny_llama: TinyModel, spoiled: Path) -> None:
    with pytest.raises(QualityTooLow, match=r"mean KL .* at most 0\.05 is wanted"):
        Gate(INT8_FLOOR).judge(source_of(tiny_llama), tiny_llama.folder, spoiled)


@pytest.mark.usefixtures("without_speed")
def test_allowed_loss_is_written_down(tiny_llama: TinyModel, spoiled: Path) -> None:
    lenient = Gate(INT8_FLOOR, allow_quality_loss=True)
    found = lenient.judge(source_of(tiny_llama), tiny_llama.folder, spoiled)
    assert found["shortfalls"]
    assert found["quality"]["mean_kl"] > found["floor"]["max_mean_kl"]


def test_below_the_floor_nothing_is_published(tiny_llama: TinyModel, tmp_path: Path) -> None:
    """No rounded weight gives the very same answers."""
    output = tmp_path / "out" / "tiny"
    result = run_quantize(str(tiny_llama.source), "--output", str(output), "--max-kl", "0")
    assert result.exit_code == 2
    assert "mean KL" in result.stderr
    assert {path.name for path in output.parent.iterdir()} == {".cache"}


def test_floor_of_4_bits_tells_a_sound_graph_from_a_broken_one(
    tiny_llama: TinyModel, built: Build, tmp_path: Path
) -> None:
    int4 = built(tiny_llama.source, "int4")
    sound = compare(tiny_llama.folder, int4, IDS)
    assert INT4_FLOOR.shortfalls(sound) == []
    assert INT8_FLOOR.shortfalls(sound) != []  # it is no int8
    broken = shutil.copytree(int4, tmp_path / "broken")
    spoil(broken)
    assert INT4_FLOOR.shortfalls(compare(tiny_llama.folder, broken, IDS)) != []


def test_floor_moves_where_it_is_told_to() -> None:
    floor = Floor(0.05, 0.93, 1.03)
    assert floor.moved(None, None, None) == floor
    assert floor.moved(0.1, None, None) == Floor(0.1, 0.93, 1.03)
    assert floor.moved(None, 0.0, 2.0) == Floor(0.05, 0.0, 2.0)


@pytest.mark.usefixtures("without_speed")
def test_options_of_the_command_move_the_floor_of_the_precision(
    tiny_llama: TinyModel, tmp_path: Path
) -> None:
    output = tmp_path / "tiny"
    arguments = [str(tiny_llama.source), "--output", str(output), "--precision", "int4"]
    result = run_quantize(*arguments, "--min-top1", "0.5", "--max-perplexity-ratio", "1.5")
    assert result.exit_code == 0, result.output
    found = json.loads((output / "quantization.json").read_text())["gate"]
    assert found["floor"] == dataclasses.asdict(Floor(INT4_FLOOR.max_mean_kl, 0.5, 1.5))


def test_command_prints_the_table_and_records_it(tiny_llama: TinyModel, tmp_path: Path) -> None:
    output = tmp_path / "tiny"
    result = run_quantize(str(tiny_llama.source), "--output", str(output))
    assert result.exit_code == 0, result.output
    for title in ("on disk, MB", "memory of the model, MB", "prefill, tokens/s", "perplexity"):
        assert title in result.stdout
    assert "precision int8 for cpu: " in result.stdout
    found = json.loads((output / "quantization.json").read_text())["gate"]
    sizes = [file.stat().st_size for file in output.glob("model.onnx*")]
    assert found["measured"]["quantized"]["bytes"] == sum(sizes)
    assert found["measured"]["quantized"]["bytes"] < found["measured"]["reference"]["bytes"]
    for measured in found["measured"].values():
        assert len(measured) == 6
        assert all(value > 0 for value in measured.values())
    assert found["shortfalls"] == []


def test_graph_too_large_for_the_memory_is_left_out_of_the_speed_table_with_the_reason(
    tiny_llama: TinyModel, int8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"reference": tiny_llama.folder, "quantized": int8}
    sizes = {n: sum(f.stat().st_size for f in p.glob("model.onnx*")) for n, p in folders.items()}
    monkeypatch.setattr(gate, "available_memory", lambda: sum(sizes.values()))
    measured, note = gate._measure(folders, 16)
    assert {name: found["bytes"] for name, found in measured.items()} == sizes
    assert len(measured["reference"]) == 1
    assert measured["quantized"]["prefill_tokens_per_second"] > 0
    assert "the reference graph was not run whole" in note
    assert "would not fit in memory" in note
    table = gate.table(GOOD, measured, INT8_FLOOR)
    [row] = [line for line in table.splitlines() if line.startswith("prefill")]
    assert row.split()[2] == "-"


def test_table_shows_both_graphs_and_each_measure_with_its_limit() -> None:
    one = {
        "bytes": 4e6,
        "model_memory_bytes": 8e6,
        "prefill_tokens_per_second": 1234.5,
        "decode_1_tokens_per_second": 20.0,
        "decode_16_tokens_per_second": 160.0,
    }
    table = gate.table(GOOD, {"reference": one, "quantized": one | {"bytes": 1e6}}, INT8_FLOOR)
    rows = [line.split() for line in table.splitlines()]
    assert rows[1] == ["on", "disk,", "MB", "4", "1"]
    assert ["prefill,", "tokens/s", "1,234.5", "1,234.5"] in rows
    assert ["perplexity", "10.000", "10.100"] in rows
    assert table.splitlines()[-1] == (
        "over 4000 tokens: mean KL 0.0100 (at most 0.05), top-1 agreement 0.9700 (at least 0.93), "
        "perplexity ratio 1.0100 (at most 1.03)"
    )


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
