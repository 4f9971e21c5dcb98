"""Lets the graph builder read the weights from the source's files, not from an fp32 copy in memory.

As it is, onnxruntime-genai 0.14.1 loads the whole model as fp32, and keeps what it converted until
the end. Here the matrices stay mapped in the type they are stored in (pages that the system can
drop), and each is converted when it is written. The graph comes out the same, byte for byte.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor, to_torch_dtype
from transformers import AutoModelForCausalLM

from .checkpoint import read_headers, stored_type

_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


@contextmanager
def mapped_weights(source: Path) -> Iterator[None]:
    """While open, the builder loads `source` in its stored type and converts tensor by tensor.

    Architectures whose builder loads its weights in a way of its own are left to it.
    """
    from onnxruntime_genai.models.builder import Model

    plain_load, plain_make = Model.load_weights, Model.make_initializer

    def load_weights(builder: Any, input_path: str) -> Any:
        dtype = find_stored_half(source)
        if dtype is None or builder.quant_type is not None:
            return plain_load(builder, input_path)
        return load(source, dtype)

    def make_initializer(
        builder: Any, tensor: Any, /, name: str, to: ir.DataType | None = None
    ) -> None:
        plain_make(builder, tensor if to is None else convert_later(tensor, name, to), name)

    Model.load_weights, Model.make_initializer = load_weights, make_initializer
    gc.freeze()  # what is here already need not be looked through in the end
    try:
        yield
    finally:
        Model.load_weights, Model.make_initializer = plain_load, plain_make
        gc.collect()  # the builder's objects hold each other, and with them the mapped files
        gc.unfreeze()


def find_stored_half(source: Path) -> torch.dtype | None:
    """The 16-bit type that all weights of `source` are stored in; None if they differ or are fp32,
    because a wider one among them must not be rounded."""
    return _HALVES.get(stored_type(read_headers(source)) or "")


def load(source: Path, dtype: torch.dtype) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    # The builder cuts, joins and transposes matrices, but calculates with norms and biases.
    for parameter in model.parameters():
        if parameter.dim() != 2:
            parameter.data = parameter.data.float()
    return model


def convert_later(tensor: torch.Tensor, name: str, to: ir.DataType) -> ir.LazyTensor:
    def convert() -> TorchTensor:
        return TorchTensor(tensor.to(to_torch_dtype(to)), name=name)

    return ir.LazyTensor(convert, dtype=to, shape=ir.Shape(tensor.shape), name=name)
