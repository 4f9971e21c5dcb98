"""How fast the model is and how long its answers are, measured as it runs.

A step takes `step_seconds`, and `token_seconds` more for each prompt token that it reads. The first
is for the whole batch, not per row: under load, where it matters, the batch is full.
"""

from __future__ import annotations

_NUM_STEPS = 16  # that the mean is about
_NUM_ANSWERS = 32
_DECAY = 1 - 1 / _NUM_STEPS
_CHUNK_DECAY = 1 - 1 / 64  # by steps that read: as many as a long prompt may take


class Pace:
    """The engine thread writes, the hub reads: each change is one assignment of a number.

    Means are exponentially weighted, plain ones as long as there are few values.
    """

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.token_seconds = 0.0
        self.steps_per_chunk = 1.0  # beside open streams prompts are read in smaller parts
        self.answer_tokens = 128.0  # of an answer; a guess until there has been one
        self._num_decodes = 0
        self._num_answers = 0
        self._num_reads = self._num_chunks = 1.0
        self._prompt_seconds = 0.0
        self._prompt_tokens = 0.0

    def guess(self, seconds: float) -> None:
        """That a step takes, as long as none has been measured."""
        if not (self._num_decodes or self._prompt_tokens):
            self.step_seconds = seconds

    def stepped(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step has run, and has read so many tokens of a prompt."""
        if self.step_seconds == 0.0:  # a guess, until there is one that only decodes
            self.step_seconds = seconds
        if num_prompt_tokens:
            beyond = seconds - self.step_seconds  # below 0 by chance, where prompts are short
            self._prompt_seconds = _DECAY * self._prompt_seconds + beyond
            self._prompt_tokens = _DECAY * self._prompt_tokens + num_prompt_tokens
            self.token_seconds = max(0.0, self._prompt_seconds / self._prompt_tokens)
        else:
            self._num_decodes += 1
            weight = max(1 / _NUM_STEPS, 1 / self._num_decodes)
            self.step_seconds += weight * (seconds - self.step_seconds)

    def read(self, num_chunks: int) -> None:
        """A step has read what completes so many chunks of the largest size."""
        self._num_reads = _CHUNK_DECAY * self._num_reads + 1
        self._num_chunks = _CHUNK_DECAY * self._num_chunks + num_chunks
        self.steps_per_chunk = max(1.0, self._num_reads / self._num_chunks)

    def answered(self, num_tokens: int) -> None:
        """An answer has ended."""
        self._num_answers += 1
        weight = max(1 / _NUM_ANSWERS, 1 / self._num_answers)
        self.answer_tokens += weight * (num_tokens - self.answer_tokens)

    def seconds(self, num_steps: float, num_prompt_tokens: float) -> float:
        return self.step_seconds * num_steps + self.token_seconds * num_prompt_tokens
