"""Which tokens may follow in each answer that is held to a grammar, as masks for the sampler.

Masks are filled on a thread of their own while the model runs; llguidance releases the GIL for
that. Knows compiled grammars only: what compiles them is `grammar.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from .sequence import Sequence

log = logging.getLogger(__name__)

Masks = dict[int, NDArray[np.uint32]]  # row -> a bit per token, the lowest of each word first

_TOO_MUCH = "it is too ambiguous, or has too many alternatives at this point"


class GrammarConstraint:
    """One answer's way through a grammar. Never raises: what cannot be followed any further has an
    `error`, and permits nothing."""

    def __init__(self, matcher: LLMatcher, num_words: int, eos_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self.num_words = num_words  # of 32 bits, of a mask
        self._eos_ids = eos_ids
        self._failure: str | None = None

    @property
    def error(self) -> str | None:
        if self._failure is not None:
            return self._failure
        return problem_of(self.matcher) if self.matcher.is_error() else None

    def accept(self, token_id: int) -> None:
        try:
            self.matcher.consume_token(token_id)
        except BaseException as error:  # a panic in Rust is no Exception
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """llguidance has raised, which it should not."""
        log.error("a grammar fails its answer", exc_info=error)
        self._failure = f"llguidance failed: {type(error).__name__}"

    @property
    def is_complete(self) -> bool:
        matcher = self.matcher
        return matcher.is_stopped() and matcher.is_accepting() and self.error is None

    def finish_mask(self, mask: NDArray[np.uint32], end_ids: frozenset[int]) -> None:
        """In place: nothing after an error; end tokens of the request's own as the EOS tokens,
        if and only if the answer may end here."""
        if self.error is not None:  # llguidance would let it end, as if it were whole
            mask[:] = 0
            return
        if own := end_ids - self._eos_ids:
            may_end = self.matcher.is_accepting()
            for id_ in own:
                word, bit = id_ // 32, np.uint32(1 << id_ % 32)
                if word < len(mask):  # else it is no token of the model
                    mask[word] = mask[word] | bit if may_end else mask[word] & ~bit


Rows = dict[int, tuple[GrammarConstraint, frozenset[int]]]  # row -> constraint, end ids


class MaskWorker:
    """Fills the masks of a step on a thread of its own, between `start` and `collect`. Nobody else
    may touch the constraints of the step meanwhile.

    Without constrained rows nothing happens and there is no thread.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._pending: Future[Masks] | None = None

    def start(self, sequences: Many[Sequence]) -> None:
        """Sequence r is row r. A step that was started before and not collected is forgotten.
        Raises TypeError for a constraint that it cannot keep to."""
        self._pending = None
        rows: Rows = {}
        for row, sequence in enumerate(sequences):
            if isinstance(sequence.constraint, GrammarConstraint):
                rows[row] = (sequence.constraint, sequence.end_ids)
            elif sequence.constraint is not None:
                raise TypeError(f"row {row}: {type(sequence.constraint).__name__} has no masks")
        if not rows:
            return
        if self._pool is None or self._executor is None:
            self._pool = ThreadPoolExecutor(1, "masks")
            self._executor = LLExecutor(self._num_threads)
        self._pending = self._pool.submit(_fill, self._executor, rows)

    def collect(self) -> Masks:
        """The masks by row, once they are there. A row whose mask could not be made permits
        nothing, and its constraint has an error."""
        pending, self._pending = self._pending, None
        return {} if pending is None else pending.result()


def _fill(executor: LLExecutor, rows: Rows) -> Masks:
    try:
        return _masks(executor, rows)
    except BaseException as error:  # a panic in Rust is no Exception
        if len(rows) > 1:  # whose fault is it?
            return {
                row: _fill(executor, {row: constrained})[row] for row, constrained in rows.items()
            }
        [(row, (constraint, _))] = rows.items()
        constraint.fail(error)
        return {row: np.zeros(constraint.num_words, np.uint32)}


def _masks(executor: LLExecutor, rows: Rows) -> Masks:
    num_words = max(constraint.num_words for constraint, _ in rows.values())
    masks = np.zeros((len(rows), num_words), np.uint32)
    places = [(constraint.matcher, i) for i, (constraint, _) in enumerate(rows.values())]
    executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, num_words * 4, len(rows))
    for mask, (constraint, end_ids) in zip(masks, rows.values(), strict=True):
        constraint.finish_mask(mask, end_ids)
    return dict(zip(rows, masks, strict=True))


def problem_of(matcher: LLMatcher) -> str:
    """Why a matcher has given up, with the limit that it ran into."""
    error = matcher.get_error().replace("<non-verbose/>", "").strip()[:1000]
    is_limit = any(hint in error.lower() for hint in ("too many", "items; max is"))
    return f"{_TOO_MUCH} ({error})" if is_limit else error
