"""The KV cache: keys and values of all layers, in slots that become more or longer.

Which sequence lies in which slot is the scheduler's business, and so is how large the cache is.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence as Ordered
from contextlib import suppress
from dataclasses import dataclass

import torch

from .sequence import Move, Resize


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


class KVCache:
    """Keys and values of all layers, each `(num_slots, kv_heads, max_len, head_dim)`.

    A slot is filled from position 0; what lies behind its filled part is never read. `version` is
    another one once the layers lie elsewhere.
    """

    def __init__(self, shape: KVShape, num_slots: int, max_len: int, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self.num_slots = num_slots
        self.max_len = max_len
        self.version = 0
        # Keys and values of layer 0, of layer 1, ...
        self.layers = [self._new_layer() for _ in range(2 * shape.num_layers)]

    @property
    def is_lazy(self) -> bool:
        """Memory is taken as tokens are written, not before."""
        return is_lazy(self._device)

    def bytes_held(self, num_written: int) -> int:
        """Memory that it takes, if so many tokens have been written since it got its size."""
        num_tokens = num_written if self.is_lazy else self.num_slots * self.max_len
        return num_tokens * self._shape.bytes_per_token

    def apply(self, moves: Ordered[Move]) -> None:
        for move in moves:
            for layer in self.layers:
                source, target = layer[move.source], layer[move.target]
                back = target[:, : move.num_back].clone() if move.num_back else None
                target[:, : move.num_tokens].copy_(source[:, : move.num_tokens])
                if back is not None:
                    source[:, : move.num_back].copy_(back)

    def resize(self, resize: Resize) -> None:
        """Layer by layer, so that no more than one is there twice. If memory runs out, all is lost:
        the cache then has no slot."""
        self.num_slots, self.max_len = resize.num_slots, resize.max_len
        self.version += 1
        try:
            for index in range(len(self.layers)):
                self._renew(index, resize.filled)
        except BaseException:
            self.num_slots = self.max_len = 0
            self.layers = [layer.new_empty(0) for layer in self.layers]
            raise
        finally:
            self._give_back()

    def _renew(self, index: int, filled: list[int]) -> None:
        old, new = self.layers[index], self._new_layer()
        for slot, num_tokens in enumerate(filled):
            if num_tokens:
                new[slot, :, :num_tokens].copy_(old[slot, :, :num_tokens])
        self.layers[index] = new
        del old
        self._give_back()

    def _new_layer(self) -> torch.Tensor:
        shape = self._shape
        dims = (self.num_slots, shape.num_kv_heads, self.max_len, shape.head_dim)
        return _zeros(dims, shape.dtype, self._device)

    def _give_back(self) -> None:
        """torch keeps what is freed on a GPU, for itself and in pieces of the old size."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def is_lazy(device: torch.device) -> bool:
    return device.type == "cpu"


def _zeros(dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not is_lazy(device):
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
