"""Which sequence lies in which slot of the KV cache. Bookkeeping: who runs is decided elsewhere.

Slots 0...n-1 are the decoding rows, for a run covers rows that lie side by side; behind them lies
the sequence that reads its prompt, addressed alone. What lies further behind is free.
"""

from __future__ import annotations

from operator import attrgetter

from .sequence import Move, Sequence, Status

_num_cached = attrgetter("num_cached")
_num_expected = attrgetter("num_expected")


class Slots:
    """Invariants: `decoding[r]` lies in slot r; `prefilling` in slot `prefill_slot`, not before
    them. Moves are made in the order in which they are told."""

    def __init__(self) -> None:
        self.decoding: list[Sequence] = []  # index = slot
        self.prefilling: Sequence | None = None
        self.prefill_slot = 0
        self._written: dict[int, int] = {}  # slot -> tokens that earlier sequences wrote to it

    @property
    def num_running(self) -> int:
        return len(self.decoding) + (self.prefilling is not None)

    @property
    def running(self) -> list[Sequence]:
        return self.decoding if self.prefilling is None else [*self.decoding, self.prefilling]

    @property
    def longest(self) -> int:
        """Tokens that all rows must have room for in the next step; 1 if there is none."""
        longest = max(map(_num_cached, self.decoding), default=0) + 1
        return longest if self.prefilling is None else max(longest, self.prefilling.num_needed)

    @property
    def expected(self) -> int:
        """Tokens that the longest will come to, as far as can be told."""
        return max(map(_num_expected, self.running), default=1)

    @property
    def num_cached(self) -> int:
        """Tokens of all that run."""
        return sum(map(_num_cached, self.running))

    @property
    def num_written(self) -> int:
        """Tokens that slots have had at the most, since the cache was made: memory that is taken
        page by page is taken for so many."""
        written = dict(self._written)
        for slot, num_tokens in enumerate(self.filled()):
            written[slot] = max(written.get(slot, 0), num_tokens)
        return sum(written.values())

    def start(self, sequence: Sequence) -> None:
        """It reads its prompt from now on."""
        self.prefilling, self.prefill_slot = sequence, len(self.decoding)

    def promote(self) -> None:
        """The one that reads its prompt is through: it decodes."""
        assert self.prefilling is not None
        assert self.prefill_slot == len(self.decoding)
        self.decoding.append(self.prefilling)
        self.prefilling = None

    def filled(self) -> list[int]:
        """Tokens of each slot, up to the last that is in use."""
        filled = list(map(_num_cached, self.decoding))
        if self.prefilling is not None:
            filled += [0] * (self.prefill_slot - len(filled))
            filled.append(self.prefilling.num_cached)
        return filled

    def renew(self) -> None:
        """The cache is a new one, with the filled parts of the old."""
        self._written.clear()

    def close_gaps(self) -> list[Move]:
        """Removes those that run no more; the moves that keep the rows contiguous, in order."""
        moves: list[Move] = []
        # One look at each row, for in most steps none has ended.
        if [s for s in self.running if s.status is not Status.RUNNING]:
            self._remember()
            moves = self._fill_gaps()
        num_rows = len(self.decoding)
        if self.prefilling is not None and self.prefill_slot != num_rows:
            self._remember()
            moves.append(Move(self.prefill_slot, num_rows, self.prefilling.num_cached))
            self.prefill_slot = num_rows
        return moves

    def _fill_gaps(self) -> list[Move]:
        moves: list[Move] = []
        rows, row = self.decoding, 0
        while row < len(rows):
            if rows[row].status is Status.RUNNING:
                row += 1
                continue
            last = rows.pop()
            if row < len(rows):  # else the last row itself has ended
                rows[row] = last
                if last.status is Status.RUNNING:
                    moves.append(Move(len(rows), row, last.num_cached))
        if self.prefilling is not None and self.prefilling.status is not Status.RUNNING:
            self.prefilling = None
        return moves

    def _remember(self) -> None:
        for slot, num_tokens in enumerate(self.filled()):
            self._written[slot] = max(self._written.get(slot, 0), num_tokens)
