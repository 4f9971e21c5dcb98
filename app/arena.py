"""How large the KV cache is to be: so many slots, so long, within a budget of bytes.

Pure integers: what fits, when the cache grows, when it gives memory back. Lengths are buckets that
double, so that a cache changes seldom. Which sequence lies where is `slots.py`'s business, and the
budget is told from outside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

_LAZY_SHARE = 0.8  # of the budget, which may come down a little as it follows what is free
_ROOMY_STEPS = 200  # in a row, behind which a cache twice as large as needed is made smaller


class Size(NamedTuple):
    """Of a KV cache: slots, and tokens in each."""

    num_slots: int
    max_len: int


NO_SIZE = Size(0, 0)


class KVUsage(NamedTuple):
    """Of the cache at one moment."""

    batch_limit: int  # most rows that may run
    why_limited: str  # cap, memory, or out of memory
    size: Size
    num_tokens: int  # of all that run
    budget: int  # bytes
    bytes_per_token: int

    @property
    def ratio(self) -> float:
        """What is in use of the budget; of the cache, if there is no budget. 1 at the most: a row
        alone may run beyond a budget, which may be 0."""
        if self.bytes_per_token:
            return min(1.0, self.num_tokens * self.bytes_per_token / max(1, self.budget))
        return self.num_tokens / max(1, self.size.num_slots * self.size.max_len)


def default_max_rows(free_bytes: int) -> int:
    """The tutorial's rule: a row for each GiB that is free, 4 at least and 32 at the most."""
    return min(32, max(4, free_bytes >> 30))


@dataclass(frozen=True, slots=True)
class KVLimits:
    """What a cache may become, and what it takes.

    `is_lazy`: memory costs nothing until a token is written to it, so slots and lengths are made as
    large as the budget permits, and hardly ever change: a change copies all that is cached.
    """

    max_rows: int
    max_len: int
    first_len: int  # the smallest bucket
    bytes_per_token: int  # of a row that runs
    bytes_per_row: int  # beside its tokens: its logits
    fixed_bytes: int = 0  # beside all rows: the logits of a prompt's chunk
    is_lazy: bool = False

    @property
    def headroom(self) -> int:
        """Tokens that rows may grow by before a newcomer has to give way."""
        return self.first_len // 8

    def bucket(self, num_tokens: int) -> int:
        """The length of a slot for so many tokens."""
        length = self.first_len
        while length < num_tokens:
            length *= 2
        return min(length, self.max_len)

    def num_bytes(self, num_rows: int, length: int) -> int:
        return self.fixed_bytes + num_rows * (length * self.bytes_per_token + self.bytes_per_row)

    def rows_within(self, num_bytes: int, length: int) -> int:
        """Rows of `length` that fit; one always may run."""
        row = self.num_bytes(1, length) - self.fixed_bytes
        fitting = (num_bytes - self.fixed_bytes) // row if row else self.max_rows
        return max(1, min(self.max_rows, fitting))


class Arena:
    """The cache's present size, and its budget.

    Invariant: but for a single row, the rows that `fits` has allowed fit in `budget` bytes.
    """

    def __init__(self, limits: KVLimits, budget: int) -> None:
        self.limits = limits
        self.budget = budget
        self.size = self._target(1, 1)
        self._num_roomy_steps = 0

    @classmethod
    def fixed(cls, num_slots: int, max_len: int) -> Arena:
        """It never changes, and all of it fits."""
        return cls(KVLimits(num_slots, max_len, max_len, 0, 0, is_lazy=True), 0)

    def max_rows(self, num_tokens: int) -> int:
        """That may run together if the longest has so many tokens; at least one."""
        return self.limits.rows_within(self.budget, self.limits.bucket(num_tokens))

    def fits(self, num_rows: int, num_tokens: int) -> bool:
        return num_rows <= self.max_rows(num_tokens)

    def resize(self, num_rows: int, needed: int, wanted: int) -> Size | None:
        """The size to take now; None if the present one may stay.

        The longest of `num_rows`, which fit, needs room for `needed` tokens; the longest of them is
        expected to come to `wanted`.
        """
        tokens = wanted if self.fits(num_rows, wanted) else needed
        target, size = self._target(num_rows, tokens), self.size
        if num_rows > size.num_slots or self.limits.bucket(tokens) > size.max_len:
            both = Size(*map(max, size, target))
            return self._take(target if self._exceeds(both) else both)
        if self._exceeds(size) and self._num_bytes(target) < self._num_bytes(size):
            return self._take(target)
        is_roomy = any(2 * new <= old for new, old in zip(target, size, strict=True))
        self._num_roomy_steps = self._num_roomy_steps + 1 if is_roomy else 0
        return self._take(target) if self._num_roomy_steps == _ROOMY_STEPS else None

    def rest(self) -> Size:
        """Nothing runs, nor has for long: the smallest size."""
        return self._take(self._target(1, 1))

    def lose(self) -> None:
        """Memory for a new size could not be had, and what the cache was is gone. Address space is
        not free here, either, it seems."""
        self.limits = replace(self.limits, is_lazy=False)
        self._take(NO_SIZE)

    def _take(self, size: Size) -> Size:
        self.size = size
        self._num_roomy_steps = 0
        return size

    def _exceeds(self, size: Size) -> bool:
        return self._num_bytes(size) > self.budget

    def _num_bytes(self, size: Size) -> int:
        return self.limits.num_bytes(*size)

    def _target(self, num_rows: int, num_tokens: int) -> Size:
        """What one would make now, for so many rows of at most so many tokens."""
        limits = self.limits
        length = limits.bucket(num_tokens)
        if not limits.is_lazy:
            doubled = 1 << (num_rows - 1).bit_length()
            slots = min(doubled, self.max_rows(length))
            return Size(max(num_rows, slots), length)
        budget = self.budget * _LAZY_SHARE
        while length < limits.max_len:
            longer = limits.bucket(length + 1)
            if limits.num_bytes(limits.max_rows, longer) > budget:
                break
            length = longer
        return Size(max(num_rows, limits.rows_within(int(budget), length)), length)
