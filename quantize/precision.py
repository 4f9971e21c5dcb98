"""Which precision for which device, and why; what each does to the graph.

The choices are measured ones (README, "Precisions"). `auto` never takes one that is slow on the
device; by name it can be had with --allow-slow.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .errors import QuantizeError
from .floor import INT4_FLOOR, INT8_FLOOR, Floor

if TYPE_CHECKING:
    import onnx

    from .rewrite import Method
    from .tensors import Weights

PRECISIONS = ("fp32", "fp16", "int8", "int8-dynamic", "int4")
DEVICES = ("cpu", "cuda")
_WHY_AUTO = {
    "cpu": "weights and activations in 8 bits, a scale per channel and per token: the fastest form "
    "here for prompts and for many rows, and nearly the fp32 answers",
    "cuda": "up to onnxruntime-gpu 1.26 MatMulNBits dequantizes the whole weight for more than one "
    "row, so int8 saves memory and costs speed; int8 by name where memory is short",
}
_SLOW = {
    ("fp32", "cuda"): "CUDA's GroupQueryAttention takes no fp32: attention would run on the CPU",
    ("fp16", "cpu"): "most fp16 operators have no CPU kernel, and are wrapped in casts",
    ("int8-dynamic", "cuda"): "DynamicQuantizeMatMul runs on the CPU only, with copies each way",
}
# By their names in /proc/cpuinfo: products of bytes are added in 32 bits, without saturation.
_DOT_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")


@dataclass(frozen=True, slots=True)
class Choice:
    """What is built. `reduce_range` has the meaning of per_token.REDUCED_LEVELS."""

    precision: str
    device: Literal["cpu", "cuda"]
    reason: str = ""
    reduce_range: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.precision not in ("fp32", "fp16")

    @property
    def graph_dtype(self) -> Literal["fp32", "fp16"]:
        """Of the graph that is exported, and then quantized or not."""
        # DynamicQuantizeMatMul takes fp32 only.
        is_weight_only = self.precision in ("int8", "int4") and self.device == "cuda"
        return "fp16" if self.precision == "fp16" or is_weight_only else "fp32"

    @property
    def floor(self) -> Floor:
        return INT4_FLOOR if self.precision == "int4" else INT8_FLOOR

    def method(self) -> Callable[[onnx.ModelProto, Weights], Method]:
        """How the matrices are replaced; of a quantized precision."""
        # Imported here: they take seconds, and a wrong argument should be told at once.
        from .dynamic import Dynamic
        from .per_token import PerToken
        from .weight_only import WeightOnly

        if self.precision == "int8-dynamic":
            return Dynamic
        if self.precision == "int8" and self.device == "cpu":
            return functools.partial(PerToken, reduce_range=self.reduce_range)
        bits = 4 if self.precision == "int4" else 8
        return functools.partial(WeightOnly, bits=bits, is_for_cuda=self.device == "cuda")


def choose(
    precision: str, device: str, *, allow_slow: bool = False, reduce_range: bool = False
) -> Choice:
    """`auto` resolved, both of them. Raises QuantizeError for what is slow on the device."""
    target: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
    if device == "auto" and _has_cuda():
        target = "cuda"
    if precision == "auto":
        precision, reason = ("int8" if target == "cpu" else "fp16"), _WHY_AUTO[target]
    else:
        reason = "as asked for"
    slow = _SLOW.get((precision, target))
    if slow is not None and not allow_slow:
        raise QuantizeError(
            f"{precision} is slow on {target}: {slow}. --allow-slow builds it all the same; "
            f"--precision auto would take {choose('auto', target).precision}"
        )
    if reduce_range and (precision, target) != ("int8", "cpu"):
        raise QuantizeError(
            f"--reduce-range is for int8 on the CPU, not for {precision} on {target}"
        )
    if (precision, target) == ("int8", "cpu") and not reduce_range and not has_dot_product():
        reduce_range = True
        reason += "; 7-bit weights, for this CPU has no 8-bit dot product and would saturate"
    return Choice(precision, target, reason, reduce_range)


def has_dot_product(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU adds up products of bytes without saturation."""
    if not cpuinfo.is_file():  # no Linux: Apple's chips have it
        return platform.machine() == "arm64"
    words = set(cpuinfo.read_text().split())
    return not words.isdisjoint(_DOT_PRODUCTS)


def _has_cuda() -> bool:
    import onnxruntime
    import torch

    return (
        "CUDAExecutionProvider" in onnxruntime.get_available_providers()
        and torch.cuda.is_available()
    )
