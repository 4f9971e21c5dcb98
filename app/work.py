"""What sequences still ask of the model, summed up: of some, and of all that wait for one owner."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter

from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """What some sequences still ask of the model; `num_steps` are those that read their prompts, in
    chunks of the largest size, `num_answer_tokens` is expected."""

    num_sequences: float = 0
    num_prompt_tokens: float = 0
    num_steps: float = 0
    num_answer_tokens: float = 0

    @property
    def row_steps(self) -> float:
        """Steps in which a row is taken, over all rows."""
        return self.num_steps + self.num_answer_tokens

    @property
    def num_tokens(self) -> float:
        return self.num_prompt_tokens + self.num_answer_tokens

    def __add__(self, other: Work) -> Work:
        return Work(
            self.num_sequences + other.num_sequences,
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_steps + other.num_steps,
            self.num_answer_tokens + other.num_answer_tokens,
        )

    def times(self, factor: float) -> Work:
        return Work(
            self.num_sequences * factor,
            self.num_prompt_tokens * factor,
            self.num_steps * factor,
            self.num_answer_tokens * factor,
        )

    def in_smaller_chunks(self, steps_per_chunk: float) -> Work:
        return replace(self, num_steps=self.num_steps * steps_per_chunk)

    def up_to(self, num_tokens: float) -> Work:
        """The same mixture, of at most so many tokens."""
        if self.num_tokens <= num_tokens:
            return self
        return self.times(num_tokens / self.num_tokens)


class Shares:
    """What several owners have, each some, summed up beforehand: it takes no longer for more."""

    def __init__(self, works: dict[str, Work]) -> None:
        works = {owner: work for owner, work in works.items() if work.num_tokens > 0}
        self._works = works
        ordered = sorted(works.values(), key=attrgetter("num_tokens"))
        self._num_tokens = [work.num_tokens for work in ordered]
        self._first = list(accumulate(ordered, initial=Work()))  # of so many with the least
        per_token = (work.times(1 / work.num_tokens) for work in reversed(ordered))
        self._per_token_of_last = list(accumulate(per_token, initial=Work()))

    @property
    def num(self) -> int:
        return len(self._works)

    @property
    def total(self) -> Work:
        return self._first[-1]

    def up_to(self, num_tokens: float, but: str) -> Work:
        """Of each owner, but for that one, at most so many tokens."""
        if self._works.keys() <= {but}:
            return Work()  # not a rest of rounding
        num_whole = bisect_right(self._num_tokens, num_tokens)
        of_all = self._first[num_whole]
        of_all += self._per_token_of_last[self.num - num_whole].times(num_tokens)
        left_out = self._works.get(but, Work()).up_to(num_tokens)
        return of_all + left_out.times(-1)


@dataclass(slots=True)
class Tally:
    """Of sequences, as they come or go. Longest answers are counted by their magnitude: what is
    expected of them changes with each answer that ends."""

    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_steps: int = 0
    num_by_magnitude: Counter[int] = field(default_factory=Counter)
    tokens_by_magnitude: Counter[int] = field(default_factory=Counter)

    def add(self, sequence: Sequence, num_steps: int) -> None:
        max_tokens = sequence.params.max_tokens
        magnitude = max_tokens.bit_length()
        self.num_prompt_tokens += len(sequence.prompt_ids)
        self.num_steps += num_steps
        self.num_by_magnitude[magnitude] += 1
        self.tokens_by_magnitude[magnitude] += max_tokens
        self.num_sequences += 1


class Line:
    """Of one owner: the hub adds to `came`, the engine thread to `gone`."""

    def __init__(self) -> None:
        self.came = Tally()
        self.gone = Tally()

    @property
    def num_sequences(self) -> int:
        return self.came.num_sequences - self.gone.num_sequences

    @property
    def num_prompt_tokens(self) -> int:
        return self.came.num_prompt_tokens - self.gone.num_prompt_tokens

    def work(self, answer_tokens: float) -> Work:
        if self.num_sequences == 0:
            return Work()
        came, gone = self.came, self.gone
        num_answer_tokens = 0.0
        for magnitude, num in came.num_by_magnitude.items():
            num_left = num - gone.num_by_magnitude[magnitude]
            at_most = came.tokens_by_magnitude[magnitude] - gone.tokens_by_magnitude[magnitude]
            num_answer_tokens += min(num_left * answer_tokens, at_most)
        return Work(
            self.num_sequences,
            self.num_prompt_tokens,
            came.num_steps - gone.num_steps,
            num_answer_tokens,
        )
