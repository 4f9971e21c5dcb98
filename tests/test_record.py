"""`quantization.json` as the server reads it: what it may leave out, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import UnservableModel
from app.record import Probe, Record, read_record

PROBE: dict[str, Any] = {
    "token_ids": [1, 2, 3],
    "top_ids": [7, 8],
    "top_logits": [1.5, -2],
    "max_difference": 0.25,
}


def written(folder: Path, content: Any) -> Path:
    (folder / "quantization.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return folder


def test_folder_without_a_record_has_neither_cap_nor_probe(tmp_path: Path) -> None:
    assert read_record(tmp_path) == Record()


def test_record_of_other_things_has_neither_cap_nor_probe(tmp_path: Path) -> None:
    content = {"name": "tiny", "precision": "int8", "gate": {"quality": {}}}
    assert read_record(written(tmp_path, content)) == Record(name="tiny", precision="int8")


def test_record_is_read_as_it_is_written(tmp_path: Path) -> None:
    content = {"context_length": 4096, "context_note": "short side", "probe": PROBE}
    assert read_record(written(tmp_path, content)) == Record(
        context_length=4096, context_note="short side", probe=Probe(**PROBE)
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *[(text, "JSON") for text in ("", "{", "nope")],
        *[(text, "object") for text in ("[]", "7", "null")],
        *[({"context_length": v}, "context_length: ") for v in (0, 1, -4096, "4096", 4096.5, True)],
        *[({name: 7}, f"{name}: ") for name in ("context_note", "name", "precision")],
        *[({"probe": value}, "probe: ") for value in ("passed", [], 7)],
        *[({"probe": PROBE | {"token_ids": v}}, "probe.token_ids") for v in ([], [-1], ["a"], 3)],
        *[({"probe": PROBE | {"top_ids": v}}, "probe.top_ids") for v in ([], [-1, 2], [1.5, 2])],
        *[({"probe": PROBE | {"top_logits": v}}, "probe.top_logits") for v in (["a", 1], 7)],
        ({"probe": PROBE | {"top_logits": [1.0]}}, "2 top_ids and 1 top_logits"),
        ('{"probe": {"top_logits": [NaN, 1]}}', "probe"),
        *[({"probe": PROBE | {"max_difference": v}}, "max_difference") for v in (0, -1, "1", None)],
        *[
            ({"probe": {k: v for k, v in PROBE.items() if k != name}}, f"probe.{name}: Field req")
            for name in PROBE
        ],
    ],
    ids=lambda value: json.dumps(value)[:70],
)
def test_wrong_record_is_refused_naming_the_file_and_the_field(
    content: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UnservableModel) as raised:
        read_record(written(tmp_path, content))
    assert "quantization.json" in str(raised.value)
    assert says in str(raised.value)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_of_a_probe_are_finite(value: str, tmp_path: Path) -> None:
    text = json.dumps({"probe": PROBE}).replace("1.5", value)
    with pytest.raises(UnservableModel, match="probe.top_logits.0"):
        read_record(written(tmp_path, text))
