"""How many rows may run after memory ran out: half of those that did, then slowly more again."""

from __future__ import annotations

_STEPS_PER_ROW = 100  # good steps behind which one more row is tried


class BatchLimit:
    """Invariant: 1 <= `value` <= `max_rows`."""

    def __init__(self, max_rows: int) -> None:
        self.value = max_rows
        self.max_rows = max_rows
        self._num_good_steps = 0

    @property
    def why(self) -> str:
        """What `value` comes from."""
        return "out of memory" if self.value < self.max_rows else "cap"

    def halve(self, num_rows: int) -> None:
        """A step of `num_rows` rows found no memory."""
        self.value = max(1, min(self.value, num_rows) // 2)
        self._num_good_steps = 0

    def recover(self) -> None:
        """A step has succeeded."""
        if self.value == self.max_rows:
            return
        self._num_good_steps += 1
        if self._num_good_steps == _STEPS_PER_ROW:
            self.value += 1
            self._num_good_steps = 0
