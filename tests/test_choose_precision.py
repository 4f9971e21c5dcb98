"""Which precision for which device, with the reason; and what is refused, before any work."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from quantize import precision
from quantize.dynamic import Dynamic
from quantize.errors import QuantizeError
from quantize.floor import INT4_FLOOR, INT8_FLOOR
from quantize.per_token import PerToken
from quantize.precision import PRECISIONS, choose, has_dot_product
from quantize.weight_only import WeightOnly

from .commands import run_quantize
from .conftest import TinyModel

SLOW = [("fp16", "cpu"), ("fp32", "cuda"), ("int8-dynamic", "cuda")]


@pytest.fixture(autouse=True)
def modern_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs the tests."""
    monkeypatch.setattr(precision, "has_dot_product", lambda: True)


@pytest.mark.parametrize(
    ("device", "has_cuda", "expected", "why"),
    [
        ("cpu", False, ("int8", "cpu"), "a scale per channel and per token"),
        ("cpu", True, ("int8", "cpu"), "a scale per channel and per token"),
        ("cuda", False, ("fp16", "cuda"), "int8 saves memory and costs speed"),
        ("auto", True, ("fp16", "cuda"), "int8 saves memory and costs speed"),
        ("auto", False, ("int8", "cpu"), "a scale per channel and per token"),
    ],
)
def test_auto_takes_what_suits_the_device_and_says_why(
    device: str,
    has_cuda: bool,
    expected: tuple[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder is built for the device that is really there (FR12)."""
    monkeypatch.setattr(precision, "_has_cuda", lambda: has_cuda)
    found = choose("auto", device)
    assert (found.precision, found.device) == expected
    assert why in found.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision_can_be_had_by_name_but_slow_ones_only_if_allowed(
    name: str, device: str
) -> None:
    if (name, device) in SLOW:
        with pytest.raises(QuantizeError, match=f"{name} is slow on {device}: .*--allow-slow"):
            choose(name, device)
    found = choose(name, device, allow_slow=(name, device) in SLOW)
    assert (found.precision, found.device, found.reason) == (name, device, "as asked for")


@pytest.mark.parametrize(
    ("name", "device", "instead"),
    [("fp16", "cpu", "int8"), ("fp32", "cuda", "fp16"), ("int8-dynamic", "cuda", "fp16")],
)
def test_refusal_names_what_auto_would_take(name: str, device: str, instead: str) -> None:
    with pytest.raises(QuantizeError, match=f"--precision auto would take {instead}$"):
        choose(name, device)


def test_int8_dynamic_for_cuda_is_refused_because_it_falls_back_to_the_cpu() -> None:
    """FR08."""
    with pytest.raises(QuantizeError, match="runs on the CPU only, with copies each way"):
        choose("int8-dynamic", "cuda")


@pytest.mark.parametrize(
    ("name", "device", "method", "dtype"),
    [
        ("int8", "cpu", PerToken, "fp32"),
        ("int4", "cpu", WeightOnly, "fp32"),
        ("int8-dynamic", "cpu", Dynamic, "fp32"),
        ("int8", "cuda", WeightOnly, "fp16"),
        ("int4", "cuda", WeightOnly, "fp16"),
        ("int8-dynamic", "cuda", Dynamic, "fp32"),  # its operator takes nothing else
    ],
)
def test_each_choice_has_its_method_and_the_graph_it_is_made_of(
    name: str, device: str, method: type, dtype: str
) -> None:
    choice = choose(name, device, allow_slow=True)
    found = choice.method()
    assert (found.func if isinstance(found, functools.partial) else found) is method
    assert choice.graph_dtype == dtype
    assert choice.is_quantized
    assert choice.floor == (INT4_FLOOR if name == "int4" else INT8_FLOOR)


@pytest.mark.parametrize(("name", "device"), [("fp32", "cpu"), ("fp16", "cuda"), ("fp16", "cpu")])
def test_float_graphs_are_not_quantized(name: str, device: str) -> None:
    choice = choose(name, device, allow_slow=True)
    assert (choice.graph_dtype, choice.is_quantized) == (name, False)


def test_reduced_range_is_for_int8_on_the_cpu() -> None:
    assert choose("int8", "cpu", reduce_range=True).reduce_range
    assert choose("auto", "cpu", reduce_range=True).reduce_range
    assert not choose("int8", "cpu").reduce_range
    for name, device in (("int8", "cuda"), ("auto", "cuda"), ("int4", "cpu"), ("fp32", "cpu")):
        with pytest.raises(QuantizeError, match="--reduce-range is for int8 on the CPU, not for"):
            choose(name, device, reduce_range=True)


def test_cpu_without_a_dot_product_gets_the_reduced_range_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "has_dot_product", lambda: False)
    for name in ("auto", "int8"):
        found = choose(name, "cpu")
        assert found.reduce_range
        assert "no 8-bit dot product" in found.reason
    assert not choose("int4", "cpu").reduce_range
    assert not choose("int8", "cuda").reduce_range


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("flags\t\t: fpu avx2 fma avx512f avx512bw\n", False),
        ("flags\t\t: fpu avx2 avx512_vnni\n", True),
        ("flags\t\t: avx2 avx_vnni\n", True),
        ("Features\t: fp asimd asimddp\n", True),
        ("Features\t: fp asimd\n", False),
        ("flags\t\t: not_avx512_vnni\n", False),
    ],
)
def test_dot_product_is_read_off_cpuinfo(cpuinfo: str, has: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert has_dot_product(tmp_path / "cpuinfo") is has


@pytest.mark.parametrize(("machine", "has"), [("arm64", True), ("x86_64", False)])
def test_without_cpuinfo_apples_chips_have_it(
    machine: str, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision.platform, "machine", lambda: machine)
    assert has_dot_product(tmp_path / "nothing") is has


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--precision", "int8-dynamic", "--device", "cuda"], "int8-dynamic is slow on cuda"),
        (["--precision", "fp16", "--device", "cpu"], "fp16 is slow on cpu"),
        (["--precision", "int4", "--reduce-range"], "--reduce-range is for int8 on the CPU"),
        (["--precision", "fp64"], "'fp64' is not one of"),
        (["--device", "tpu"], "'tpu' is not one of"),
    ],
)
def test_command_refuses_before_any_work_and_leaves_nothing(
    options: list[str], says: str, tiny_llama: TinyModel, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "tiny"
    result = run_quantize(str(tiny_llama.source), "--output", str(output), *options)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not output.parent.exists()
