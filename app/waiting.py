"""The sequences that wait, and whose turn it is. Pure: no I/O, clock, thread or array.

Owners share the model by tokens, prompts and answers alike: next is the owner that has been served
least, by the counters of Sheng et al. 2024, "Fairness in Serving Large Language Models"
(arXiv:2401.00588, algorithm 2). Within an owner the lower priority comes first, then who came
first. No method takes longer the more sequences wait.
"""

from __future__ import annotations

from collections import OrderedDict

from .sequence import Sequence


class WaitingQueue:
    """Invariants: an owner is in `_lines` if and only if it waits; no owner that waits has been
    served less than `_floor`."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._served: dict[str, int] = {}  # tokens, by owner; owners are few: keys of a file
        self._floor = 0  # what the owner had been served that was taken last
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, sequence: Sequence) -> None:
        owner = sequence.owner
        if owner not in self._lines:
            self._lines[owner] = _Line()
            # While it asked for nothing it has saved up nothing.
            self._served[owner] = max(self._served.get(owner, 0), self._floor)
        self._lines[owner].add(sequence)
        self._num += 1

    def put_back(self, sequence: Sequence) -> None:
        """One that was taken: it is the next one of its owner and priority again."""
        self.add(sequence)
        self._lines[sequence.owner].advance(sequence)

    def first(self) -> Sequence:
        """The next one. Raises ValueError if nobody waits."""
        return self._lines[self._next_owner()].first()

    def take(self) -> Sequence:
        """Removes the next one. Raises ValueError if nobody waits."""
        owner = self._next_owner()
        self._floor = self._served[owner]
        sequence = self._lines[owner].first()
        self.remove(sequence)
        return sequence

    def _next_owner(self) -> str:
        return min(self._lines, key=self._served.__getitem__)  # of equals, who waits longer

    def remove(self, sequence: Sequence) -> bool:
        """False if it does not wait here."""
        line = self._lines.get(sequence.owner)
        if line is None or not line.remove(sequence):
            return False
        self._num -= 1
        if line.is_empty:
            del self._lines[sequence.owner]
        return True

    def charge(self, owner: str, num_tokens: int) -> None:
        """The model has read or written so many tokens for `owner`, which has waited here."""
        self._served[owner] += num_tokens


class _Line:
    """Of one owner. An OrderedDict finds its first and loses any in one step, a deque does not."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[Sequence, None]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._by_priority

    def add(self, sequence: Sequence) -> None:
        self._by_priority.setdefault(sequence.priority, OrderedDict())[sequence] = None

    def advance(self, sequence: Sequence) -> None:
        self._by_priority[sequence.priority].move_to_end(sequence, last=False)

    def first(self) -> Sequence:
        return next(iter(self._by_priority[min(self._by_priority)]))

    def remove(self, sequence: Sequence) -> bool:
        equals = self._by_priority.get(sequence.priority)
        if equals is None or sequence not in equals:
            return False
        del equals[sequence]
        if not equals:
            del self._by_priority[sequence.priority]
        return True
