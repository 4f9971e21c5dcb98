"""The portable form: the graph concatenates new keys to old ones, at one column for all rows.

So the rows of a run are aligned at their ends: copied out of the cache with pads on their left,
which the mask hides; each row's positions are told. What is new in `present` is written back. The
copies make it slower than the fused form, and it holds three times the rows while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import UnservableModel
from .form import DecoderForm, Run
from .kv_cache import KVCache, KVShape

_PROBE_IDS = [1, 2, 3, 5, 8, 13]
_SHORT_PROBE_IDS = [55, 34, 21]
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
        chunks, with pads on its left, and beside a row of another length.

        A graph may count positions from the pads, may have been frozen by tracing at one shape, or
        may not heed the mask of each row: its inputs do not tell.
        """
        ids, short = self._fitting(_PROBE_IDS), self._fitting(_SHORT_PROBE_IDS)
        half, last = len(ids) // 2, len(ids) - 1
        cache = KVCache(self._kv_shape(), 2, len(ids), self._device)
        whole = self._probe(cache, "a prompt is read", [ids])
        short_whole = self._probe(cache, "a prompt is read", [short], first_row=1)
        self._probe(cache, "a prompt is read", [ids[:half]])
        for what, start, num_pads in (
            ("a prompt is read in chunks", half, 0),
            ("a token is decoded alone", last, 0),
            ("a row has pads on its left, as beside a longer one", last, _PROBE_PADS),
        ):
            found = self._probe(cache, what, [ids[start:]], [start], num_pads=num_pads)
            self._compare(what, found, whole)
        what = "rows of different lengths are decoded together"
        self._probe(cache, "a prompt is read", [ids[:last]])
        self._probe(cache, "a prompt is read", [short[:-1]], first_row=1)
        found = self._probe(cache, what, [ids[-1:], short[-1:]], [last, len(short) - 1])
        self._compare(what, found, torch.cat([whole, short_whole]))

    def _fitting(self, ids: list[int]) -> list[int]:
        return [i % self._graph.vocab_size for i in ids]

    def _probe(
        self,
        cache: KVCache,
        what: str,
        ids: list[list[int]],
        lengths: Sequence[int] = (0,),
        *,
        first_row: int = 0,
        num_pads: int = 0,
    ) -> torch.Tensor:
        """Logits of each row, (rows, vocab); refused unless all are finite."""
        graph = self._graph
        dtype = getattr(torch, graph.logits_type)
        logits = torch.empty((len(ids), graph.vocab_size), dtype=dtype, device=self._device)
        run = Run(first_row, np.array(ids, np.int64), np.array(lengths, np.int64), logits)
        try:
            self._run(cache, run, num_pads)
        except Exception as error:
            raise UnservableModel(f"{graph.path} fails when {what}: {error}") from error
        if not logits.isfinite().all():
            raise UnservableModel(
                f"{graph.path}: its logits are not finite (NaN or infinity) when {what}"
            )
        return logits.float()

    def _compare(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        pairs = zip(found, expected, strict=True)
        if not all(_is_close(row, own) for row, own in pairs):
            raise UnservableModel(f"{self._graph.path}: its answers change when {what}")

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
