"""Room on the disk: asked for before the work, and told when it ends in the midst (FR03)."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantize import MODEL_FILE
from quantize.data_file import DATA_FILE
from quantize.errors import QuantizeError
from quantize.hf_folder import check_folder
from quantize.precision import Choice, choose
from quantize.rewrite import rewrite
from quantize.space import Size, is_out_of_space, require_space, temporaries_in

from .commands import run_quantize
from .conftest import TinyModel

WIDTH, VOCAB = 512, 1000
BILLION = Size(num_parameters=10**9, num_embedded=10**8, num_bytes=2 * 10**9)


def left_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} if folder.exists() else set()


def with_free(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=num_bytes))


def test_too_little_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(3 * 10**9, monkeypatch)
    with pytest.raises(QuantizeError, match=r"about 5\.6 GB of disk .* has 3\.0 GB free"):
        require_space(BILLION, choose("int8", "cpu"), tmp_path)


def test_enough_is_told_in_one_line_with_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(7 * 10**9, monkeypatch)
    line = require_space(BILLION, choose("int8", "cpu"), tmp_path)
    assert line.startswith("1,000 million parameters: needs up to 5.6 GB of disk (7.0 GB free)")
    assert line.endswith("about 3.5 GB of memory")


@pytest.mark.parametrize(
    ("size", "choice", "gigabytes"),
    [
        (BILLION, Choice("fp32", "cpu"), 4.4),  # the graph is moved, not copied
        (BILLION, Choice("fp16", "cuda"), 2.2),
        (BILLION, Choice("int8", "cpu"), 4.4 + 1.15),
        (BILLION, Choice("int8", "cuda"), 2.2 + 1.15),  # made of an fp16 graph
        (BILLION, Choice("int4", "cpu"), 4.4 + 0.95),
        (Size(10**9, 10**8, 4 * 10**9, is_converted=True), Choice("fp32", "cpu"), 8.4),
        (Size(10**9, 10**8, 4 * 10**9, form="portable"), Choice("int8", "cpu"), 8.8),
        (Size(10**9, 10**8, 4 * 10**9, is_exported=False), Choice("fp32", "cpu"), 4.0),
        (Size(10**9, 10**8, 4 * 10**9, is_exported=False), Choice("int8", "cpu"), 4.0 + 1.15),
    ],
    ids=lambda value: value.precision if isinstance(value, Choice) else "",
)
def test_disk_is_that_of_all_stages_at_once(size: Size, choice: Choice, gigabytes: float) -> None:
    assert size.disk_bytes(choice) == pytest.approx(gigabytes * 10**9, abs=0.1 * 10**9)


def write_matrices(folder: Path) -> int:
    """Those of a decoder with tied weights, wide enough that scales weigh as in a real one; how
    many parameters it has."""
    shapes = {f"attention.{i}": (WIDTH, WIDTH) for i in range(4)}
    shapes |= {"mlp.up": (WIDTH, 4 * WIDTH), "mlp.down": (4 * WIDTH, WIDTH), "head": (WIDTH, VOCAB)}
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    names = ["ids", *weights]
    nodes = [helper.make_node("Gather", ["embedding", "ids"], ["/ids"])]
    nodes += [
        helper.make_node("MatMul", [f"/{before}", name], [f"/{name}"], f"/{name}")
        for before, name in zip(names, names[1:], strict=False)
    ]
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, None])],
        [helper.make_tensor_value_info("/head", TensorProto.FLOAT, [1, None, VOCAB])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()]
        + [numpy_helper.from_array(weights["head"].T, "embedding")],
    )
    (folder / MODEL_FILE).write_bytes(helper.make_model(graph).SerializeToString())
    return sum(array.size for array in weights.values())


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_estimate_is_little_more_than_a_build_publishes(precision: str, tmp_path: Path) -> None:
    choice = choose(precision, "cpu")
    size = Size(write_matrices(tmp_path), WIDTH * VOCAB, 0, is_exported=False)
    (tmp_path / "built").mkdir()
    rewrite(tmp_path, tmp_path / "built", choice.method())
    published = (tmp_path / "built" / DATA_FILE).stat().st_size
    estimate = size.disk_bytes(choice) - Size(0, 0, 0, is_exported=False).disk_bytes(choice)
    assert published <= estimate <= 1.05 * published


@pytest.mark.parametrize(
    ("size", "measured"),
    [
        (Size(3821079552, 98500608, 7642181968), 8.6),  # Phi-3 Mini in bfloat16
        (Size(763266048, 98500608, 1526536160), 3.01),  # five layers of it
        (Size(763266048, 98500608, 3053068256), 4.42),  # in float32
        (Size(483428352, 65536000, 966865176, 84 << 20), 2.13),  # a Llama in bfloat16
        (Size(578095104, 16384000, 2312397016, 768 << 20), 3.68),  # with many heads, in float32
        (Size(578095104, 16384000, 1156206912, 384 << 20), 2.16),
    ],
)
def test_memory_is_little_more_than_was_measured(size: Size, measured: float) -> None:
    assert measured <= size.memory_bytes() / 1e9 <= 1.15 * measured


def test_matrices_that_the_builder_joins_are_counted(tiny_llama: TinyModel) -> None:
    joined = 2 * 4 * 64 * (64 + 2 * 32)  # layers, bytes, hidden, widths of queries, keys and values
    assert check_folder(tiny_llama.source)[1].num_joined_bytes == joined


def test_command_refuses_before_it_exports(
    tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(10**6, monkeypatch)
    output = tmp_path / "out" / "tiny"
    result = run_quantize(str(tiny_llama.source), "--output", str(output), "--precision", "fp32")
    assert result.exit_code == 2
    assert "has 1 MB free" in result.stderr
    assert left_in(output.parent) == {".cache"}


class Boom(RuntimeError):
    """Of a stage, and nobody's duty to catch."""


def fill_disk(*_: Any) -> None:
    """The kernel's own answer, and a half-written temporary file besides."""
    Path(tempfile.mkdtemp(), "half").write_text("half")
    Path("/dev/full").write_bytes(bytes(1 << 20))


def explode(*_: Any) -> None:
    Path(tempfile.mkdtemp(), "half").write_text("half")
    raise Boom("a stage")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("stage", ["export.export_fused", "rewrite.rewrite", "record.write"])
@pytest.mark.parametrize("failure", [fill_disk, explode])
def test_stage_that_fails_leaves_nothing_beside_the_output_nor_in_tmpdir(
    stage: str, failure: Any, tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmpdir, output = tmp_path / "tmp", tmp_path / "out" / "tiny"
    tmpdir.mkdir()
    monkeypatch.setenv("TMPDIR", str(tmpdir))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(f"quantize.{stage}", failure)
    if stage == "record.write":
        monkeypatch.setattr("quantize.gate.Gate.judge", lambda *_: {})
    result = run_quantize(str(tiny_llama.source), "--output", str(output))
    if failure is fill_disk:
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1].startswith("quantize: the disk is full")
    else:
        assert isinstance(result.exception, Boom)
    assert left_in(output.parent) == {".cache"}
    assert left_in(tmpdir) == set()


def test_libraries_find_tmpdir_as_it_was_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    before = tempfile.gettempdir()
    with temporaries_in(tmp_path):
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path)
    assert tempfile.gettempdir() == before
    assert "TMPDIR" not in os.environ


def test_full_disk_is_recognized_behind_other_errors() -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("cannot save") from error
    except RuntimeError as error:
        assert is_out_of_space(error)
    assert is_out_of_space(RuntimeError("write failed: No space left on device (os error 28)"))
    assert not is_out_of_space(OSError(13, "Permission denied"))
