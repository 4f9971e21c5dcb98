"""One request's answer as it grows: token ids in, text deltas out, for each of its choices.

Plain and streamed answers both come through here, so they cannot differ. It belongs to the hub.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import gevent

from .detokenizer import Detokenizer
from .errors import ClientLeft, DeadEnd, DeadlineExceeded, Draining, ModelFailure
from .sequence import Advance, FinishReason, Sequence, TokenLogprobs
from .stops import StopMatcher

if TYPE_CHECKING:
    from gevent.event import Event

    from .backlog import Place
    from .bridge import TokenStream
    from .direct import Outlet


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


class Completion:
    """One choice. `num_tokens` is how many tokens it has taken, an end token included: the engine
    may be ahead of it."""

    def __init__(
        self, stream: TokenStream, detokenizer: Detokenizer, stops: Iterable[str] = ()
    ) -> None:
        self.sequence: Sequence = stream.sequence
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._stream = stream
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
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

    def place(self) -> Place | None:
        """In the queue; None if it does not wait."""
        return self._stream.place()

    def expire(self) -> Delta:
        """Ends a choice whose time is over; its last delta."""
        self._stream.end(FinishReason.TIMEOUT)
        self.finish_reason = FinishReason.TIMEOUT
        return self._delta(self._rest())

    @property
    def has_arrived(self) -> bool:
        """Is there something to take?"""
        return self._stream.has_arrived

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
                text = self._detokenizer.feed((token_id,))
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


class Answer:
    """All choices of one request. Iterate once: yields (choice, delta) as they come, for each
    choice one with a finish reason.

    Raises ModelFailure if the engine fails, DeadEnd if the request leaves no token to choose,
    Draining if the server stops, ClientLeft behind `leave`, DeadlineExceeded if `deadline_at` (of
    `time.monotonic`) passes before any choice has a token. At the deadline the engine stops also
    where nobody iterates: the reader may be waiting for a client that does not read.
    """

    def __init__(
        self,
        request_id: str,
        completions: list[Completion],
        arrival: Event,
        deadline_at: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.completions = completions
        self._arrival = arrival
        self._deadline_at = deadline_at
        self._has_left = False
        self._failure: Exception | None = None  # of a passage
        self._outlet: Outlet | None = None
        self._frame: Callable[[int, Delta], bytes] = _no_frame
        self._timer: Any = None
        self._look_at_deadline()

    def write_to(self, outlet: Outlet, frame: Callable[[int, Delta], bytes]) -> None:
        """While its reader waits for deltas, those that do not end a choice go straight to
        `outlet`, framed: they are not yielded."""
        self._outlet, self._frame = outlet, frame

    def wait(self, seconds: float | None) -> bool:
        """Until there is something to tell, a failure too; False if there is not yet, or behind
        `nudge`."""
        self._arrival.wait(seconds)
        if not (has_news := self._has_news()):
            self._arrival.clear()
        return has_news

    def nudge(self) -> None:
        """Wakes whoever waits."""
        self._arrival.set()

    def place(self) -> Place | None:
        """In the queue, of its first choice; None once that is taken up."""
        return self.completions[0].place()

    def __iter__(self) -> Iterator[tuple[int, Delta]]:
        running = dict(enumerate(self.completions))
        while running:
            self._wait(running)
            self._arrival.clear()
            self._check_client()
            # First: what has come by the deadline counts, however long a yield takes.
            is_over = self._seconds_left() == 0.0
            for choice, completion in running.items():
                self._check_client()
                if (delta := completion.take()) is not None:
                    yield choice, delta
            if is_over:
                yield from self._expire(running)
            running = {i: c for i, c in running.items() if c.finish_reason is None}

    @property
    def has_logprobs(self) -> bool:
        return self.completions[0].sequence.params.num_logprobs is not None

    def abort(self) -> None:
        """The client has gone, or the answer cannot be given; nothing happens if it is complete."""
        self._stop_timer()
        for completion in self.completions:
            completion.abort()

    def leave(self) -> None:
        """The client has gone, and whoever waits for the answer is to know."""
        self.abort()
        self._has_left = True
        self._arrival.set()

    def _wait(self, running: dict[int, Completion]) -> None:
        outlet = self._outlet
        if outlet is None or not outlet.is_open:
            self._arrival.wait(self._seconds_left())
            return
        for choice, completion in running.items():
            completion.open(self._passage(choice, completion, outlet))
        try:
            self._arrival.wait(self._seconds_left())
        finally:
            for completion in running.values():
                completion.open(None)
        outlet.flush()
        if self._failure is not None:
            raise self._failure

    def _passage(
        self, choice: int, completion: Completion, outlet: Outlet
    ) -> Callable[[Advance], None]:
        """From the hub's callback to the socket; whatever else there is to do is the reader's, who
        is woken."""
        frame, pass_on, send = self._frame, completion.pass_on, outlet.send

        def write(advance: Advance) -> None:
            try:
                delta = pass_on(advance)
                if delta is not None:
                    if not (framed := frame(choice, delta)) or send(framed):
                        return
                elif completion.finish_reason is None:
                    return
            except Exception as error:
                self._failure = error
            self._arrival.set()

        return write

    def _has_news(self) -> bool:
        has_arrived = any(completion.has_arrived for completion in self.completions)
        return has_arrived or self._has_left or self._seconds_left() == 0.0

    def _check_client(self) -> None:
        if self._has_left:
            raise ClientLeft("the client has left")

    def _look_at_deadline(self) -> None:
        """On the hub, at the deadline and until then."""
        self._stop_timer()
        left = self._seconds_left()
        if left:
            self._timer = gevent.get_hub().loop.timer(left)
            self._timer.start(self._look_at_deadline)
        elif left is not None:
            for completion in self.completions:
                completion.overrun()
            self._arrival.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    def _seconds_left(self) -> float | None:
        if self._deadline_at is None:
            return None
        return max(0.0, self._deadline_at - time.monotonic())

    def _expire(self, running: dict[int, Completion]) -> Iterator[tuple[int, Delta]]:
        left = {i: c for i, c in running.items() if c.finish_reason is None}
        ended = [(choice, completion.expire()) for choice, completion in left.items()]
        if not any(completion.num_tokens for completion in self.completions):
            raise DeadlineExceeded("the request's time was over before its first token")
        yield from ended


def _check(reason: FinishReason, error: str | None) -> None:
    """Raises for an end that is none of the answer's."""
    if reason is FinishReason.ERROR:
        raise ModelFailure(error or "the model run failed")
    if reason is FinishReason.DEAD_END:
        raise DeadEnd(error or "no token is permitted")
    if reason is FinishReason.ABORT:  # not by this client, which is still here
        raise Draining(error or "the request was aborted")


def _no_frame(choice: int, delta: Delta) -> bytes:
    raise AssertionError("nothing is passed on without an outlet")
