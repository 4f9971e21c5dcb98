"""What is told of a graph whose attention looks further back than config.json has it, or less far.

How many tokens are served is tested with the folders that cap it (`test_folder`, `test_forms`).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from app.context import window_warnings
from app.graph import read_graph
from app.model import OnnxModel

from .conftest import TinyModel
from .edits import copy_edited, copy_of
from .folders import make_genai
from .tiny import CONTEXT, make_phi3

ASKED = {"sliding_window": 32}
NOWHERE = {"layer_types": ["full_attention", "full_attention"]}
LAST = {"layer_types": ["full_attention", "sliding_attention"]}


def told(folder: Path, windows: set[int], config: dict[str, Any] | None) -> list[str]:
    graph = dataclasses.replace(read_graph(folder), windows=frozenset(windows))
    own = folder / "config.json"
    own.unlink()
    if config is not None:
        own.write_text(json.dumps(config))
    return window_warnings(folder, graph, CONTEXT)


@pytest.fixture
def folder(tiny_phi3: TinyModel, tmp_path: Path) -> Path:
    return copy_of(tiny_phi3.folder, tmp_path / "copy")


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, {-1}),
        ({"sliding_window": None}, {-1}),
        (ASKED, {32}),
        (ASKED | LAST, {32, -1}),
        (ASKED | NOWHERE, {-1}),
        (ASKED | {"use_sliding_window": False}, {-1}),  # Qwen2
        ({"sliding_window": CONTEXT}, {-1}),
        ({}, {CONTEXT}),
        ({"sliding_window": CONTEXT + 1}, {2 * CONTEXT}),
        (ASKED, set()),  # portable: the graph does not tell
        (None, {-1}),
    ],
    ids=str,
)
def test_window_that_config_has_too_is_not_told(
    config: dict[str, Any] | None, windows: set[int], folder: Path
) -> None:
    assert told(folder, windows, config) == []


@pytest.mark.parametrize(
    ("config", "windows", "says"),
    [
        (ASKED, {-1}, "asks for a sliding window of 32, the graph's local_window_size is -1 "),
        (ASKED, {16}, "window of 32, the graph's local_window_size is 16 "),
        (ASKED, {16, 32}, "window of 32, the graph's local_window_size is 16, 32 "),
        (ASKED, {CONTEXT}, "window of 32, "),
        ({}, {32}, "asks for no sliding window, the graph's local_window_size is 32 "),
        (ASKED | NOWHERE, {32}, "asks for no sliding window"),
        ({"sliding_window": CONTEXT - 1}, {-1}, f"sliding window of {CONTEXT - 1},"),
    ],
    ids=str,
)
def test_window_that_differs_is_told_with_both_sizes(
    config: dict[str, Any], windows: set[int], says: str, folder: Path
) -> None:
    [warning] = told(folder, windows, config)
    assert says in warning


def drop_windows(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        kept = [a for a in node.attribute if a.name != "local_window_size"]
        del node.attribute[:]
        node.attribute.extend(kept)


def test_attention_without_the_attribute_has_no_window(
    tiny_phi3: TinyModel, tmp_path: Path
) -> None:
    def set_one(model: onnx.ModelProto) -> None:
        drop_windows(model)
        node = next(n for n in model.graph.node if n.op_type == "GroupQueryAttention")
        node.attribute.append(helper.make_attribute("local_window_size", 32))

    graph = read_graph(copy_edited(tiny_phi3.folder, tmp_path / "copy", set_one))
    assert graph.windows == {32, -1}


def test_window_that_a_graph_lacks_is_logged_and_in_info(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here in Microsoft's layout, as published: with config.json."""
    source = make_phi3(tmp_path / "source", sliding_window=16)
    folder = copy_edited(make_genai(source, tmp_path / "made"), tmp_path / "copy", drop_windows)
    shutil.copyfile(source / "config.json", folder / "config.json")
    model = OnnxModel.load(folder, "cpu", num_threads=1)
    [warning] = model.describe(folder)["warnings"]
    assert "asks for a sliding window of 16" in warning
    assert warning in [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
