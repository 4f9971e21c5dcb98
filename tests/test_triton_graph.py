"""A graph whose cache was cut off says what torch says, for rows of different lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import triton_graph
from triton_graph import CannotServeLogits, write_without_cache

from .conftest import Bring, TinyModel
from .folders import make_portable

ROWS = [[5, 17, 33, 60, 9], [7, 8], [11]]


@pytest.mark.parametrize("form", ["fused", "portable"])
def test_rows_padded_on_the_right_get_the_logits_of_torch(
    tiny: TinyModel, bring: Bring, tmp_path: Path, form: str
) -> None:
    folder = tiny.folder if form == "fused" else bring(make_portable, tiny.source)
    graph = write_without_cache(folder, tmp_path)
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [node.name for node in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert [node.name for node in session.get_outputs()] == ["logits"]
    nodes = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.node
    assert all(node.input[-1] for node in nodes if node.input)
    ids = np.zeros((3, 5), np.int64)
    mask = np.zeros((3, 5), np.int64)
    for index, row in enumerate(ROWS):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    [logits] = session.run(None, {"input_ids": ids, "attention_mask": mask})
    for index, row in enumerate(ROWS):
        found = logits[index, 0 if graph.has_last_logits_only else len(row) - 1]
        expected = tiny.reference.logits(row)[-1].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-3)


def test_a_graph_with_other_names_is_refused(
    tiny_phi3: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_graph, "NAMES", ("tokens", "attention_mask", "logits"))
    with pytest.raises(CannotServeLogits, match="tokens, attention_mask, logits are needed"):
        write_without_cache(tiny_phi3.folder, tmp_path)
