"""What every run of a graph binds, whatever the graph's form: ids, mask, positions and logits.

How keys and values reach the graph is the form's own business (`fused.py`, `portable.py`);
`past` and `present` exist only there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from .graph import Graph
from .kv_cache import KVCache
from .runner import Mask, runner_of


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the session: `ids` go behind what rows `first_row`... of the cache hold.

    Rows of different lengths take one token each; several tokens are for one row alone.
    """

    first_row: int
    ids: NDArray[np.int64]  # (rows, tokens)
    lengths: NDArray[np.int64]  # (rows,), tokens that are cached already
    logits: torch.Tensor  # (rows, vocab), written: those of the last token

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return int(self.ids.shape[1])

    @property
    def max_length(self) -> int:
        return int(self.lengths.max())


class DecoderForm(ABC):
    """A session, and how its graph takes rows of the KV cache."""

    memory_factor: ClassVar[int]  # memory of a running row, in units of its cached keys and values

    def __init__(self, session: ort.InferenceSession, graph: Graph, device: torch.device) -> None:
        self._session = session
        self._graph = graph
        self._device = device
        self._runner = runner_of(session, device)
        self._all_logits = torch.empty(0)

    @abstractmethod
    def run(self, cache: KVCache, run: Run) -> None:
        """Writes the logits into `run.logits`, and the new keys and values into the cache."""

    def check(self) -> None:  # noqa: B027  (a form may have nothing to check)
        """Raises UnservableModel if the graph turns out not to keep what its form promises."""

    def _place(self, tensor: torch.Tensor, type_: str) -> tuple[object, ...]:
        """`tensor` as the arguments of bind_input and bind_output."""
        return (
            self._device.type,
            0,
            np.dtype(type_),
            tuple(tensor.shape),
            tensor.data_ptr(),
        )

    def _execute(self, binding: ort.IOBinding, run: Run, mask: Mask) -> None:
        """Binds all but the cache, and runs."""
        graph, runner = self._graph, self._runner
        runner.feed(binding, graph.input_ids, run.ids)
        runner.feed(binding, graph.attention_mask, mask)
        if graph.position_ids is not None:
            positions = run.lengths[:, None] + np.arange(run.num_tokens)  # (rows, tokens)
            runner.feed(binding, graph.position_ids, positions)
        logits = self._logits_of(run)
        binding.bind_output(graph.logits, *self._place(logits, graph.logits_type))
        runner.run(binding)
        if logits.shape[1] > 1:
            run.logits.copy_(logits[:, -1])

    def _logits_of(self, run: Run) -> torch.Tensor:
        """Where the graph writes: `(rows, 1, vocab)`, or of every token if it insists."""
        if self._graph.has_last_logits_only or run.num_tokens == 1:
            return run.logits[:, None]
        shape = (run.num_rows, run.num_tokens, self._graph.vocab_size)
        size = run.num_rows * run.num_tokens * self._graph.vocab_size
        if self._all_logits.numel() < size:
            self._all_logits = run.logits.new_empty(size)
        return self._all_logits[:size].view(shape)
