"""The KV cache: how many rows fit (`KVBudget`, integers) and the rows themselves (`KVCache`).

Fixed size for now: `num_rows` rows of `max_len` tokens. Which sequence lies in which row is the
scheduler's business.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence as Ordered
from contextlib import suppress
from dataclasses import dataclass

import torch

from .sequence import Move


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the graph stores per token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers (Phi-3 Mini in fp16: 393,216)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVBudget:
    """How many rows of `bytes_per_row` fit in `num_bytes`, `max_rows` at the most."""

    num_bytes: int
    bytes_per_row: int
    max_rows: int

    @property
    def num_rows(self) -> int:
        return min(self.max_rows, self.num_bytes // self.bytes_per_row)


class KVCache:
    """Keys and values of all layers, each `(num_rows, kv_heads, max_len, head_dim)`.

    A row is filled from position 0; what lies behind its filled part is never read.
    """

    def __init__(self, shape: KVShape, num_rows: int, max_len: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.max_len = max_len
        dims = (num_rows, shape.num_kv_heads, max_len, shape.head_dim)
        self.layers = [  # keys and values of layer 0, of layer 1, ...
            _zeros(dims, shape.dtype, device) for _ in range(2 * shape.num_layers)
        ]

    def apply(self, moves: Ordered[Move]) -> None:
        for move in moves:
            for layer in self.layers:
                filled = layer[move.source, :, : move.num_tokens]
                layer[move.target, :, : move.num_tokens].copy_(filled)


def _zeros(dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(dims, dtype=dtype, device=device)
    # Anonymous memory costs nothing until a token is written to it, by pages of 4 KiB. Huge pages
    # would undo that: the first token of a row touches each head's part, and with a context of 8k
    # that part is just one huge page, so a batch of short answers would fill the whole cache.
    num_bytes = math.prod(dims) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages refuses to be told
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(dims)
