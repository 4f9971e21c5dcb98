"""How much work waits, how long that will take, and whether there is room for more.

The bounds of the queue, and the estimates that a client is told. Each field is written by one
thread only: what has come by the hub, what has left the queue by the engine thread, each by adding
to numbers; what waits is their difference. No method takes longer for a longer queue or for more
owners, but for a look through either once a second at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter

from .errors import Overloaded
from .pace import Pace
from .sequence import Sequence, Status, StepPlan
from .work import Line, Shares, Work

_LISTED_SECONDS = 1.0
_LISTED_PER_SECOND = 2000  # a long queue is listed less often: that takes 2 ms per thousand
_OWNERS_PER_SECOND = 1000  # likewise, of many owners what each has


@dataclass(frozen=True, slots=True)
class Place:
    """In the queue: `position`, from 1, of `length`; `seconds` until a row is free, as expected."""

    position: int
    length: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Running:
    """What runs, on so many rows at most, and the steps until the first of them ends."""

    num_rows: int
    work: Work
    num_steps_to_first: float


class Backlog:
    """`max_sequences` and `max_prompt_tokens` may wait. A request that is larger by itself is taken
    when nothing waits: it would never be otherwise."""

    def __init__(
        self,
        max_sequences: int = 1024,
        max_prompt_tokens: int = 524_288,
        prefill_chunk: int = 128,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pace = Pace()
        self._max_sequences = max_sequences
        self._max_prompt_tokens = max_prompt_tokens
        self._prefill_chunk = prefill_chunk
        self._clock = clock
        self._lines: dict[str, Line] = {}  # by owner; the hub drops those that are empty
        self._all = Line()
        self._shares = Shares({})
        self._shares_at = 0.0
        self._plan: StepPlan | None = None
        self._preempted: list[Sequence] = []  # wait again; not in the queue's numbers
        self._listing = 0  # its number; a sequence has it, and the Work in front of it
        self._num_listed = 0
        self._listed_at = -_LISTED_SECONDS
        self._listed_running = self._running()

    # --- on the hub -------------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        """That wait."""
        return self._all.num_sequences

    @property
    def num_prompt_tokens(self) -> int:
        """Of those that wait."""
        return self._all.num_prompt_tokens

    def check(self, owner: str, num_sequences: int, num_prompt_tokens: int) -> None:
        """Raises Overloaded if there is no room for so many more.

        A named owner may fill as much as it leaves free, so that there is room for others (the
        dynamic threshold of Choudhury & Hahne 1998, with a factor of 1).
        """
        num, tokens = self.num_sequences, self.num_prompt_tokens
        if num == 0:
            return
        own = self._lines.get(owner) if owner else None
        own_num, own_tokens = (own.num_sequences, own.num_prompt_tokens) if own else (0, 0)
        if own_num + num_sequences > self._max_sequences - num:
            limit = f"at most {self._max_sequences} may wait (MAX_QUEUED_REQUESTS)"
        elif own_tokens + num_prompt_tokens > self._max_prompt_tokens - tokens:
            limit = f"at most {self._max_prompt_tokens} tokens may wait (MAX_QUEUED_TOKENS)"
        else:
            return
        if own_num:
            limit += f", and of one API key as many as it leaves free: of this one {own_num} wait"
        place = self.next_place(owner)
        raise Overloaded(
            f"the server is overloaded: {num} choices with {tokens} prompt tokens wait; {limit}. "
            f"What is in front takes about {place.seconds:.0f} s",
            place.position,
            place.length,
            place.seconds,
        )

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            line = self._lines.get(sequence.owner)
            if line is None:
                line = self._lines[sequence.owner] = Line()
            num_steps = self._num_steps(len(sequence.prompt_ids))
            line.came.add(sequence, num_steps)
            self._all.came.add(sequence, num_steps)

    def next_place(self, owner: str) -> Place:
        """That a sequence would have that came now, behind all others of its owner."""
        ahead = self._ahead(owner)
        position = round(ahead.num_sequences) + 1
        return Place(position, self.num_sequences, self._seconds(ahead, self._running()))

    def place(self, sequence: Sequence, open_sequences: Iterable[Sequence]) -> Place | None:
        """None if it does not wait. Among `open_sequences`, all that have not ended, in the order
        in which they came."""
        if not _waits(sequence):
            return None
        is_old = self._clock() - self._listed_at >= max(
            _LISTED_SECONDS, self._num_listed / _LISTED_PER_SECOND
        )
        if is_old or not self._is_listed(sequence):
            self._list(open_sequences)
        listed = sequence.listed
        if listed is None or not self._is_listed(sequence):
            return None  # the engine has taken it up meanwhile, or all have been ended
        ahead = Work(*listed[1:])
        seconds = self._seconds(ahead, self._listed_running)
        return Place(int(ahead.num_sequences) + 1, self._num_listed, seconds)

    def _is_listed(self, sequence: Sequence) -> bool:
        return sequence.listed is not None and sequence.listed[0] == self._listing

    def _ahead(self, owner: str) -> Work:
        """All of the owner's, and of each other owner as much as that and a sequence more."""
        shares = self._shares_now()
        line = self._lines.get(owner)
        own = line.work(self.pace.answer_tokens) if line is not None else Work()
        total = shares.total
        share = own.num_tokens + total.num_tokens / max(1, total.num_sequences)
        return own + shares.up_to(share, owner)

    def _shares_now(self) -> Shares:
        """Of all owners that wait; of many as it was a moment ago."""
        now = self._clock()
        if now - self._shares_at >= self._shares.num / _OWNERS_PER_SECOND:
            # All that came of an empty one has gone: the engine thread looks for it no more.
            self._lines = {name: line for name, line in self._lines.items() if line.num_sequences}
            answer_tokens = self.pace.answer_tokens
            works = {name: line.work(answer_tokens) for name, line in self._lines.items()}
            self._shares, self._shares_at = Shares(works), now
        return self._shares

    def _list(self, open_sequences: Iterable[Sequence]) -> None:
        """Orders all that wait as the scheduler will, as if all owners had been served alike.

        Bare numbers, for they may be thousands.
        """
        lines: dict[str, list[Sequence]] = {}
        for sequence in open_sequences:
            if _waits(sequence):
                lines.setdefault(sequence.owner, []).append(sequence)
        tagged: list[tuple[float, Sequence, int, int, float]] = []
        chunk, expected = self._prefill_chunk, self.pace.answer_tokens
        for line in lines.values():
            line.sort(key=attrgetter("priority"))
            served = 0.0
            for sequence in line:
                prompt = len(sequence.prompt_ids)
                answer = min(expected, sequence.params.max_tokens)
                tagged.append((served, sequence, prompt, -(-prompt // chunk), answer))
                served += prompt + answer
        if len(lines) > 1:
            tagged.sort(key=itemgetter(0))
        self._listing += 1
        self._num_listed = len(tagged)
        prompts, steps, answers = 0, 0, 0.0
        for position, (_, sequence, prompt, step, answer) in enumerate(tagged):
            sequence.listed = (self._listing, position, prompts, steps, answers)
            prompts, steps, answers = prompts + prompt, steps + step, answers + answer
        self._listed_at = self._clock()
        self._listed_running = self._running_of()  # the list has those that were preempted

    def _work(self, sequence: Sequence) -> Work:
        """Of one that runs."""
        num_unread = max(0, len(sequence.prompt_ids) - sequence.num_cached)
        num_answered = len(sequence.output_ids)
        expected = max(1.0, self.pace.answer_tokens - num_answered)
        left = min(expected, sequence.params.max_tokens - num_answered)
        return Work(1, num_unread, self._num_steps(num_unread), left)

    def _running(self) -> _Running:
        """With those that were preempted, which the queue's numbers leave out."""
        return self._running_of(each for each in self._preempted if each.status is Status.WAITING)

    def _running_of(self, preempted: Iterable[Sequence] = ()) -> _Running:
        plan = self._plan
        if plan is None:
            return _Running(1, Work(), 0)
        sequences = [*plan.decode, *([plan.prefill.sequence] if plan.prefill else []), *preempted]
        works = [self._work(sequence) for sequence in sequences if not sequence.is_finished]
        steps_per_chunk = self.pace.steps_per_chunk
        first = min((w.in_smaller_chunks(steps_per_chunk).row_steps for w in works), default=0.0)
        return _Running(plan.rows_per_run, sum(works, Work()), first)

    def _seconds(self, ahead: Work, running: _Running) -> float:
        """Until a row is free for a sequence behind `ahead`.

        Prompts are read one after the other; rows end, on average, once all that they have had in
        front has run, but for half an answer of each that still runs then.
        """
        total = (ahead + running.work).in_smaller_chunks(self.pace.steps_per_chunk)
        num_steps = total.num_steps
        if total.num_sequences >= running.num_rows:
            num_steps = max(num_steps, running.num_steps_to_first)
            if ahead.num_sequences:
                half_answers = ahead.num_answer_tokens / ahead.num_sequences / 2
                row_steps = total.row_steps - (running.num_rows - 1) * half_answers
                num_steps = max(num_steps, row_steps / running.num_rows)
        return self.pace.seconds(num_steps, total.num_prompt_tokens)

    def _num_steps(self, num_prompt_tokens: int) -> int:
        return -(-num_prompt_tokens // self._prefill_chunk)

    # --- on the engine thread ---------------------------------------------------------------------

    def planned(self, plan: StepPlan) -> None:
        """A step begins; what it takes out of the queue waits no more."""
        if plan.preempted or self._preempted:
            preempted = dict.fromkeys([*self._preempted, *plan.preempted])
            self._preempted = [each for each in preempted if each.status is Status.WAITING]
        # One that has ended is not to be kept for it.
        self._plan = replace(plan, dequeued=[], preempted=[])
        for sequence in plan.dequeued:
            line = self._lines.get(sequence.owner)
            if line is not None:  # it has come through the hub
                num_steps = self._num_steps(len(sequence.prompt_ids))
                self._all.gone.add(sequence, num_steps)
                line.gone.add(sequence, num_steps)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        num_tokens = 0
        if (chunk := plan.prefill) is not None:
            num_tokens, sequence = len(chunk.token_ids), chunk.sequence
            if sequence.num_preemptions == 0:  # else what it reads again was never in the queue
                # What the cache had is read in no step, as it were in the first.
                start = 0 if chunk.start == sequence.num_reused else chunk.start
                end = chunk.start + num_tokens
                self.pace.read(self._num_steps(end) - self._num_steps(start))
        self.pace.stepped(num_tokens, seconds)

    def finished(self, sequence: Sequence) -> None:
        if sequence.output_ids:
            self.pace.answered(len(sequence.output_ids))


def _waits(sequence: Sequence) -> bool:
    return sequence.status is Status.WAITING and sequence.ended_by is None
