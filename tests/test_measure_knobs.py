"""ONNX Runtime's knobs: each is taken, and its numbers go where they belong."""

from __future__ import annotations

import json
from pathlib import Path

import measure_knobs
import pytest
from measure_knobs import KNOBS, MEMORIES, SPEEDS, known_before, measure, summarize, table

from .conftest import TinyModel


@pytest.mark.parametrize("name", ["threads-1", "arena-off", "arena-shrinkage", "prepacking-off"])
def test_knob_is_taken_and_everything_is_measured(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(measure_knobs, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(measure_knobs, "PROMPT_TOKENS", 4)
    monkeypatch.setattr(measure_knobs, "NUM_STEPS", {1: 3, 8: 3, 32: 3})
    found = measure(tiny_llama.folder, KNOBS[name])
    assert list(found) == [*SPEEDS, *MEMORIES]
    assert all(value > 0 for value in found.values())


def row(value: float) -> dict[str, float]:
    return dict.fromkeys((*SPEEDS, *MEMORIES), value)


def test_ratios_are_those_of_a_pair() -> None:
    result = summarize("arena-off", [(row(1), row(2)), (row(2), row(2)), (row(4), row(2))])
    assert result["ratio"]["decode 8"] == {"median": 1, "min": 0.5, "max": 2}
    [*_, line] = table([result])
    assert line.startswith("| `arena-off`: malloc for each tensor | 1.00 (0.50 to 2.00) |")


def test_knobs_that_were_measured_before_stay_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "knobs.json"
    assert known_before(file, ["arena-off"]) == []
    results = [summarize(name, [(row(1), row(2))]) for name in ("arena-off", "threads-1")]
    file.write_text(json.dumps({"results": results}))
    assert [known["knob"] for known in known_before(file, ["arena-off"])] == ["threads-1"]
