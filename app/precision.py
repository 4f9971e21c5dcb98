"""Does the precision of a graph suit the device that it was given?

A folder holds one graph, so nothing else can be chosen; where it does not suit, it is served all
the same, many times slower than one that does (onnxruntime-genai#406: fp16 on a CPU 0.43 tokens/s,
fp32 10.7), unless STRICT_PRECISION refuses that.
"""

from __future__ import annotations

import torch


def find_mismatch(
    device: torch.device, form: str, kv_dtype: torch.dtype, logits_dtype: torch.dtype
) -> str | None:
    """What is wrong and what to do about it; None if the precision suits the device."""
    if device.type == "cpu" and torch.float16 in (kv_dtype, logits_dtype):
        return (
            "the graph is in fp16 and runs on the CPU, which has few fp16 kernels and converts "
            "around each of the others: serve a folder built with --precision int8 or fp32"
        )
    if device.type == "cuda" and form == "fused" and kv_dtype == torch.float32:
        return (
            "CUDA has no fp32 GroupQueryAttention: attention runs on the CPU, with copies; serve a "
            "folder built for CUDA, with --precision fp16"
        )
    return None
