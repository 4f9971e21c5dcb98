"""The portable form: the graph concatenates new keys to old ones, at one column for all rows.

So the rows of a run are aligned at their ends: copied out of the cache with pads on their left,
which the mask hides; each row's positions are told. What is new in `present` is written back. The
copies make it slower than the fused form, and it holds three times the rows while it runs.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import UnservableModel
from .form import DecoderForm, Run
from .kv_cache import KVCache, KVShape

_PROBE_IDS = [1, 2, 3, 5, 8, 13]
_PROBE_PADS = 5


class PortableForm(DecoderForm):
    memory_factor = 3  # the cache itself, past and present

    def run(self, cache: KVCache, run: Run) -> None:
        self._run(cache, run, num_pads=0)

    def _run(self, cache: KVCache, run: Run, num_pads: int) -> None:
        """`num_pads`: columns on the left of every row, more than the run needs."""
        width = run.max_length + num_pads  # of the past
        pads = width - run.lengths[:, None]  # (rows, 1)
        mask = (np.arange(width + run.num_tokens) >= pads).astype(np.int64)
        # A pad may hold any keys that are finite: those of the row's first token, say.
        old = self._places(cache, run, np.maximum(np.arange(width) - pads, 0))
        new = self._places(cache, run, run.lengths[:, None] + np.arange(run.num_tokens))
        binding = self._session.io_binding()
        pasts, presents = [], []  # held until the run is over
        for index, layer in enumerate(cache.layers):
            past = _tokens(layer).index_select(0, old).view(*self._dims(run, width))
            present = past.new_empty(self._dims(run, width + run.num_tokens))
            binding.bind_input(self._graph.past[index], *self._place(past, self._graph.kv_type))
            binding.bind_output(
                self._graph.present[index], *self._place(present, self._graph.kv_type)
            )
            pasts.append(past)
            presents.append(present)
        self._execute(binding, run, mask)
        for layer, present in zip(cache.layers, presents, strict=True):
            written = present[:, :, width:].reshape(-1, self._graph.head_dim)
            _tokens(layer).index_copy_(0, new, written)

    def _dims(self, run: Run, width: int) -> tuple[int, ...]:
        return (run.num_rows, self._graph.num_kv_heads, width, self._graph.head_dim)

    def _places(self, cache: KVCache, run: Run, columns: NDArray[np.int64]) -> torch.Tensor:
        """Where in a layer's `_tokens` the run's rows have these columns, head by head.

        `columns` (rows, n) -> (rows * kv_heads * n,)
        """
        rows = run.first_row + np.arange(run.num_rows)
        heads = np.arange(self._graph.num_kv_heads)
        starts = (rows[:, None] * len(heads) + heads) * cache.max_len  # (rows, kv_heads)
        places = starts[:, :, None] + columns[:, None, :]
        return torch.from_numpy(places.reshape(-1)).to(self._device)

    def check(self) -> None:
        """Raises UnservableModel unless a prompt gets the same logits read whole, read in two
        chunks, and with pads on its left.

        A graph may count positions from the pads, may have been frozen by tracing at one shape, or
        may not heed the mask: its inputs do not tell.
        """
        ids, half = [i % self._graph.vocab_size for i in _PROBE_IDS], len(_PROBE_IDS) // 2
        cache = KVCache(self._kv_shape(), 1, len(ids), self._device)
        whole = self._probe(cache, "a prompt is read", ids)
        self._probe(cache, "a prompt is read", ids[:half])
        for what, start, num_pads in (
            ("a prompt is read in chunks", half, 0),
            ("a token is decoded alone", len(ids) - 1, 0),
            ("a row has pads on its left, as beside a longer one", len(ids) - 1, _PROBE_PADS),
        ):
            found = self._probe(cache, what, ids[start:], start, num_pads)
            if not _is_close(found, whole):
                raise UnservableModel(f"{self._graph.path}: its answers change when {what}")

    def _probe(
        self, cache: KVCache, what: str, ids: list[int], length: int = 0, num_pads: int = 0
    ) -> torch.Tensor:
        graph = self._graph
        dtype = getattr(torch, graph.logits_type)
        logits = torch.empty((1, graph.vocab_size), dtype=dtype, device=self._device)
        run = Run(0, np.array([ids], np.int64), np.array([length], np.int64), logits)
        try:
            self._run(cache, run, num_pads)
        except Exception as error:
            raise UnservableModel(f"{graph.path} fails when {what}: {error}") from error
        return logits[0].float()

    def _kv_shape(self) -> KVShape:
        graph = self._graph
        dtype = getattr(torch, graph.kv_type)
        return KVShape(graph.num_layers, graph.num_kv_heads, graph.head_dim, dtype)


def _tokens(layer: torch.Tensor) -> torch.Tensor:
    """`(rows, kv_heads, max_len, head_dim)` as one list of vectors, without a copy."""
    return layer.view(-1, layer.shape[-1])


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within what rounding (fp16, int8 activations) may do; a wrong position does far more."""
    return bool((found - expected).abs().max() <= 0.05 * (expected.max() - expected.min()))
