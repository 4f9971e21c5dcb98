"""The fused form: GroupQueryAttention appends to the rows of the cache in place.

Past and present of a run are the same memory, so a step copies no cache. Which rows a run covers
is fixed by shape and address of what is bound: a decode run binds rows 0..n-1, a prefill run one
row by its offset.
"""

from __future__ import annotations

import onnxruntime as ort
import torch

from .form import DecoderForm, Run
from .graph import Graph
from .kv_cache import KVCache


class FusedForm(DecoderForm):
    memory_factor = 1

    def __init__(self, session: ort.InferenceSession, graph: Graph, device: torch.device) -> None:
        super().__init__(session, graph, device)
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}
        self._bound: tuple[KVCache, int] | None = None

    def run(self, cache: KVCache, run: Run) -> None:
        binding = self._binding(cache, run.first_row, run.num_rows)
        # Ones up to each row's own length: GroupQueryAttention counts them to find where the row
        # ends, so rows of any lengths share a run.
        ends = run.lengths[:, None] + run.num_tokens
        mask = self._runner.ones_below(ends, run.max_length + run.num_tokens)
        self._execute(binding, run, mask)

    def _binding(self, cache: KVCache, first_row: int, num_rows: int) -> ort.IOBinding:
        """Past and present of these rows bound to the cache; made once per pair of numbers, as
        long as the cache lies where it does."""
        if self._bound != (cache, cache.version):
            self._bound = (cache, cache.version)
            self._bindings.clear()
        found = self._bindings.get((first_row, num_rows))
        if found is not None:
            return found
        binding = self._session.io_binding()
        names = zip(self._graph.past, self._graph.present, cache.layers, strict=True)
        for past, present, layer in names:
            place = self._place(layer[first_row : first_row + num_rows], self._graph.kv_type)
            binding.bind_input(past, *place)
            binding.bind_output(present, *place)
        self._bindings[first_row, num_rows] = binding
        return binding
