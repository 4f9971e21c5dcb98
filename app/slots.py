"""Which sequence lies in which slot of the KV cache. Bookkeeping: who runs is decided elsewhere.

Slots 0...n-1 are the decoding rows, for a run covers rows that lie side by side; behind them lies
the sequence that reads its prompt, addressed alone. What lies further behind is free, and keeps
what the last sequence there has left until the slot is needed: a prompt that begins likewise takes
it over, or copies it, and reads only the rest.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from .prefixes import Content, Found, Ids, as_ids, joined, longest
from .sequence import FinishReason, Move, Sequence, Status

_num_cached = attrgetter("num_cached")
_num_expected = attrgetter("num_expected")


class Slots:
    """Invariants: `decoding[r]` lies in slot r; `prefilling` in slot `prefill_slot`, right behind
    them; `_kept` has free slots only. Moves are made in the order in which they are told."""

    def __init__(self, min_shared: int | None = None) -> None:
        """Prefixes of fewer tokens than `min_shared` are not worth it; None: none is."""
        self.decoding: list[Sequence] = []  # index = slot
        self.prefilling: Sequence | None = None
        self.prefill_slot = 0
        self._min_shared = min_shared
        self._kept: dict[int, Content] = {}  # by slot
        self._read: dict[Sequence, Ids] = {}  # what a running sequence was admitted with
        self._num_uses = 0
        self._written: dict[int, int] = {}  # slot -> tokens that earlier sequences wrote to it

    @property
    def num_running(self) -> int:
        return len(self.decoding) + (self.prefilling is not None)

    @property
    def running(self) -> list[Sequence]:
        return self.decoding if self.prefilling is None else [*self.decoding, self.prefilling]

    @property
    def num_kept(self) -> int:
        """Free slots that keep something."""
        return len(self._kept)

    @property
    def longest(self) -> int:
        """Tokens that all rows must have room for in the next step; 1 if there is none."""
        longest = max(map(_num_cached, self.decoding), default=0) + 1
        return longest if self.prefilling is None else max(longest, self.prefilling.num_needed)

    @property
    def expected(self) -> int:
        """Tokens that the longest will come to, as far as can be told, or has come to if it is kept
        only; never less than `longest`, for answers go on beyond what was expected."""
        running = max(map(_num_expected, self.running), default=1)
        return max(self.longest, running, max(map(len, self._kept.values()), default=1))

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

    def start(self, sequence: Sequence, num_slots: int) -> list[Move]:
        """It reads its prompt from now on, but for what one of the `num_slots` has of it already;
        the moves that bring this into its slot."""
        self.prefilling, self.prefill_slot = sequence, len(self.decoding)
        if self._min_shared is None:
            return []
        ids = self._read[sequence] = as_ids(sequence.tokens(0, sequence.num_to_read))
        if self.prefill_slot >= num_slots:  # which is made in this step, and nothing is kept there
            return []
        self._remember()
        found = self._find(ids, sequence.owner)
        moves = self._fetch(found, num_slots)
        sequence.num_cached = found.num_tokens if found is not None else 0
        return moves

    def promote(self) -> None:
        """The one that reads its prompt is through: it decodes."""
        assert self.prefilling is not None
        assert self.prefill_slot == len(self.decoding)
        self.decoding.append(self.prefilling)
        self.prefilling = None

    def filled(self) -> list[int]:
        """Tokens of each slot, up to the last that holds some."""
        num_slots = max([self.num_running, *(slot + 1 for slot in self._kept)])
        filled = [*map(_num_cached, self.running), *[0] * (num_slots - self.num_running)]
        for slot, content in self._kept.items():
            filled[slot] = len(content)
        return filled

    def renew(self, num_slots: int, max_len: int) -> list[Move]:
        """The cache becomes another one, with the filled parts of the old, as far as it has room
        for them. The moves to be made before bring what was used last to where it stays."""
        moves: list[Move] = []
        lost = [slot for slot in self._kept if slot >= num_slots]
        for slot in sorted(lost, key=lambda slot: self._kept[slot].used, reverse=True):
            moves += self._put_away(slot, self.num_running, num_slots)
        kept = {slot: self._kept[slot] for slot in self._kept if slot < num_slots}
        self._kept = {
            slot: replace(content, ids=content.ids[:max_len]) for slot, content in kept.items()
        }
        self._written.clear()
        return moves

    def forget(self) -> None:
        """Nothing can be told any more of what free slots hold, but that it takes memory."""
        self._remember()
        self._kept.clear()

    def close_gaps(self) -> list[Move]:
        """Removes those that run no more; the moves that keep the rows contiguous, in order."""
        # One look at each row, for in most steps none has ended.
        if not [s for s in self.running if s.status is not Status.RUNNING]:
            return []
        self._remember()
        if self.prefilling is not None and self.prefilling.status is not Status.RUNNING:
            self._keep(self.prefill_slot, self.prefilling)
            self.prefilling = None
        moves = self._fill_gaps()
        num_rows = len(self.decoding)
        if self.prefilling is not None and self.prefill_slot != num_rows:
            moves.append(self._swap(self.prefill_slot, num_rows, self.prefilling.num_cached))
            self.prefill_slot = num_rows
        return moves

    def _fill_gaps(self) -> list[Move]:
        moves: list[Move] = []
        rows, row = self.decoding, 0
        while row < len(rows):
            if rows[row].status is Status.RUNNING:
                row += 1
                continue
            ended, last = rows[row], rows.pop()
            slot = len(rows)
            if last.status is Status.RUNNING:
                rows[row] = last
                self._keep(row, ended)
                moves.append(self._swap(slot, row, last.num_cached))
            else:
                self._keep(slot, last)
        return moves

    def _keep(self, slot: int, sequence: Sequence) -> None:
        """What it leaves there, if that is worth it and can be trusted: a run that failed may have
        written anything."""
        read = self._read.pop(sequence, None)
        self._kept.pop(slot, None)
        is_sound = sequence.finish_reason is not FinishReason.ERROR
        if read is None or not is_sound or sequence.num_cached < (self._min_shared or 0):
            return
        ids = joined(read, sequence.output_ids[sequence.num_reread :])[: sequence.num_cached]
        self._kept[slot] = Content(ids, sequence.owner, self._next_use())

    def _find(self, ids: Ids, owner: str) -> Found | None:
        assert self._min_shared is not None
        kept = [(slot, each.ids) for slot, each in self._kept.items() if each.owner == owner]
        rows = [
            (row, self._read[each][: each.num_cached])
            for row, each in enumerate(self.decoding)
            if each.owner == owner
        ]
        return longest(ids, [*kept, *rows], self._min_shared)

    def _fetch(self, found: Found | None, num_slots: int) -> list[Move]:
        """Brings it to the slot of the prefill; what is kept there goes elsewhere if it can."""
        target = self.prefill_slot
        if found is None:
            return self._put_away(target, target + 1, num_slots)
        source, num_tokens = found.slot, found.num_tokens
        if source in self._kept:
            self._kept[source] = replace(self._kept[source], used=self._next_use())
            if found.num_others < (self._min_shared or 0):  # nothing much is lost
                del self._kept[source]
                return [self._swap(source, target, num_tokens)] if source != target else []
        moves = self._put_away(target, target + 1, num_slots)
        return [*moves, Move(source, target, num_tokens)] if source != target else moves

    def _swap(self, source: int, target: int, num_tokens: int) -> Move:
        """Of a sequence, against what is kept in `target`."""
        back = self._kept.pop(target, None)
        if back is None:
            return Move(source, target, num_tokens)
        self._kept[source] = back
        return Move(source, target, num_tokens, len(back))

    def _put_away(self, slot: int, first: int, end: int) -> list[Move]:
        """What is kept in `slot` goes to that slot from `first` to `end` that is empty or, unless
        it is later used itself, was not used for longest; else it is lost."""
        content = self._kept.pop(slot, None)
        others = [other for other in range(first, end) if other != slot]
        if content is None or not others:
            return []
        target = min(others, key=self._used)
        if self._used(target) > content.used:
            return []
        self._kept[target] = content
        return [Move(slot, target, len(content))]

    def _used(self, slot: int) -> int:
        content = self._kept.get(slot)
        return -1 if content is None else content.used

    def _next_use(self) -> int:
        self._num_uses += 1
        return self._num_uses

    def _remember(self) -> None:
        for slot, num_tokens in enumerate(self.filled()):
            self._written[slot] = max(self._written.get(slot, 0), num_tokens)
