"""One choice of an answer as it grows: token ids in, text deltas out.

Plain and streamed answers both come through here, so they cannot differ. It belongs to the hub, or
to whichever thread has taken its place (`triton_backend`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .detokenizer import Detokenizer
from .errors import DeadEnd, Draining, ModelFailure
from .sequence import Advance, FinishReason, Sequence, TokenLogprobs
from .stops import StopMatcher

if TYPE_CHECKING:
    from .backlog import Place

_NO_TEXTS: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token and what the model thought of it; for requests that ask for that."""

    id: int
    logprobs: TokenLogprobs


class Delta(NamedTuple):  # one a token
    """Text that can be sent, and on a choice's last delta why it ends.

    `tokens` are those that came since the delta before, if log-probabilities were asked for: all
    that were generated but an end token. Their text may be held back still.
    """

    text: str
    finish_reason: FinishReason | None = None
    tokens: tuple[Token, ...] = ()


class Stream(Protocol):
    """A sequence's advances as they come; `bridge.TokenStream` is the hub's."""

    sequence: Sequence
    passage: Callable[[Advance], None] | None

    def take(self) -> list[Advance]: ...
    def end(self, reason: FinishReason) -> None: ...
    def place(self) -> Place | None: ...


class Completion:
    """One choice. `num_tokens` is how many tokens it has taken, an end token included: the engine
    may be ahead of it."""

    __slots__ = (
        *("sequence", "num_tokens", "finish_reason", "_stream", "_detokenizer", "_stops"),
        *("_is_plain", "_tokens", "_kept"),
    )

    def __init__(
        self, stream: Stream, detokenizer: Detokenizer, stops: Collection[str] = ()
    ) -> None:
        self.sequence: Sequence = stream.sequence
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._stream = stream
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._is_plain = not stops and self.sequence.params.num_logprobs is None
        self._tokens: list[Token] = []
        self._kept = ""  # text of `pass_on`, for `take`

    def take(self) -> Delta | None:
        """What has come; None if that is nothing to tell.

        Raises ModelFailure if the engine failed, DeadEnd if the request left no token to
        choose, Draining if the server stops.
        """
        text, self._kept = self._kept, ""
        for advance in self._stream.take():
            if self.finish_reason is not None:  # it came behind a stop string
                break
            text += self._add(advance)
        has_news = text or self._tokens or self.finish_reason is not None
        return self._delta(text) if has_news else None

    def pass_on(self, advance: Advance) -> Delta | None:
        """What an advance brings that does not end the sequence, nor wait in the stream; None if
        that is nothing to tell. If it ends the choice, at a stop string, `take` has it.

        Raises whatever the text may.
        """
        text = self._add(advance)
        if self.finish_reason is None:
            return self._delta(text) if text or self._tokens else None
        self._kept = text
        return None

    @property
    def texts(self) -> Mapping[int, str]:
        """By token id, what `pass_on` would return the text of next, where it would do no more than
        count the token: then the caller may count it instead. Not all of them are known."""
        return self._detokenizer.texts if self._is_plain else _NO_TEXTS

    def place(self) -> Place | None:
        """In the queue; None if it does not wait."""
        return self._stream.place()

    def expire(self) -> Delta:
        """Ends a choice whose time is over; its last delta."""
        self._stream.end(FinishReason.TIMEOUT)
        self.finish_reason = FinishReason.TIMEOUT
        return self._delta(self._rest())

    def open(self, passage: Callable[[Advance], None] | None) -> None:
        """Advances that end nothing go there from now on, and are not taken."""
        self._stream.passage = passage

    def overrun(self) -> None:
        """Its time is over: it gets no more tokens. `expire` ends it for its reader."""
        if self.finish_reason is None:
            self._stream.end(FinishReason.TIMEOUT)

    def abort(self) -> None:
        """Nobody waits for the choice any more; nothing happens if it has ended."""
        if self.finish_reason is None:
            self._stream.end(FinishReason.ABORT)
            self.finish_reason = FinishReason.ABORT

    def _add(self, advance: Advance) -> str:
        """Text that the advance completes."""
        reason = advance.finish_reason
        if reason is not None:
            _check(reason, advance.error)
            if reason is FinishReason.TIMEOUT:  # `overrun`; `expire` has the last word
                return ""
        text, token_id = "", advance.token_id
        if token_id is not None:
            self.num_tokens += 1
            if token_id not in self.sequence.end_ids:
                text = self._detokenizer.add(token_id)
                if self.num_tokens >= self.sequence.params.min_tokens:
                    text = self._stops.feed(text)
                if advance.logprobs is not None:
                    self._tokens.append(Token(token_id, advance.logprobs))
        if reason is not None:
            text += self._rest()
            self.finish_reason = FinishReason.STOP if self._stops.is_stopped else reason
        elif self._stops.is_stopped:
            self.finish_reason = FinishReason.STOP
            self._stream.end(FinishReason.STOP)
        return text

    def _rest(self) -> str:
        """What was held back, now that no more comes: half a character, the start of a stop."""
        return self._stops.feed(self._detokenizer.feed([], is_last=True)) + self._stops.flush()

    def _delta(self, text: str) -> Delta:
        if not self._tokens:
            return Delta(text, self.finish_reason)
        tokens, self._tokens = tuple(self._tokens), []
        return Delta(text, self.finish_reason, tokens)


def _check(reason: FinishReason, error: str | None) -> None:
    """Raises for an end that is none of the answer's."""
    if reason is FinishReason.ERROR:
        raise ModelFailure(error or "the model run failed")
    if reason is FinishReason.DEAD_END:
        raise DeadEnd(error or "no token is permitted")
    if reason is FinishReason.ABORT:  # not by this client, which is still here
        raise Draining(error or "the request was aborted")
