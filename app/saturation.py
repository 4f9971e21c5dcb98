"""How full an engine is, as one number: what an autoscaler goes by. Pure.

A busy model tells nothing of that, for one user keeps it busy. What counts is what the next request
would lack: a row, memory for its tokens, or a place in a queue that is short enough.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Of one engine, at one moment."""

    num_running: int
    num_waiting: int
    batch_limit: int  # rows that may run; 0 until a model is loaded
    kv_usage: float  # 0 to 1, of the budget
    wait_seconds: float  # in the queue, as expected; 0 if nothing waits

    def factor(self, target_seconds: float) -> float:
        """The largest of three: requests by rows, the KV cache's usage, and the wait by the
        `target_seconds` that it should take at the most. 1 is full; a queue makes it more."""
        if self.batch_limit == 0:
            return 0.0
        wanted = (self.num_running + self.num_waiting) / self.batch_limit
        return max(wanted, self.kv_usage, self.wait_seconds / target_seconds)
