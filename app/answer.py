"""One request's answer: all its choices, as they come, until each has ended.

Its reader takes deltas; what comes while that waits may go straight to the client's socket. It
belongs to the hub.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import gevent

from .completion import Completion, Delta
from .errors import ClientLeft, DeadlineExceeded
from .passage import Passage

if TYPE_CHECKING:
    from gevent.event import Event

    from .backlog import Place
    from .direct import Outlet


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
        self._outlet: Outlet | None = None
        self._frame: Callable[[int, Delta], bytes] = _no_frame
        self._is_passed = False  # what comes goes to the outlet
        self._taken: list[tuple[int, Delta]] = []  # by `begins`
        self._timer: Any = None
        self._look_at_deadline()

    def write_to(self, outlet: Outlet, frame: Callable[[int, Delta], bytes]) -> None:
        """While its reader waits for deltas, those that do not end a choice go straight to
        `outlet`, framed: they are not yielded."""
        self._outlet, self._frame = outlet, frame

    def begins(self, seconds: float) -> bool:
        """Waits until there is something to iterate; False if there is not yet. Tokens may have
        come all the same: half a character, or what could become a stop string.

        Raises ModelFailure, DeadEnd and Draining as iterating does.
        """
        give_up_at = time.monotonic() + seconds
        while not self._taken:
            if not self._arrival.wait(max(0.0, give_up_at - time.monotonic())):
                return False
            if self._has_left or self._seconds_left() == 0.0:  # iterating tells
                break
            self._arrival.clear()
            for choice, completion in enumerate(self.completions):
                if completion.finish_reason is None and (delta := completion.take()) is not None:
                    self._taken.append((choice, delta))
        return True

    def remark(self, comment: bytes) -> None:
        """Sends what belongs to no choice, if the reader waits and the client has taken the rest:
        not into the middle of another write."""
        outlet = self._outlet
        if outlet is None or not self._is_passed or outlet.rest:
            return
        if not outlet.send(comment):
            self._arrival.set()

    def place(self) -> Place | None:
        """In the queue, of its first choice; None once that is taken up."""
        return self.completions[0].place()

    def __iter__(self) -> Iterator[tuple[int, Delta]]:
        taken, self._taken = self._taken, []
        yield from taken
        told = {choice for choice, delta in taken if delta.finish_reason is not None}
        running = {i: c for i, c in enumerate(self.completions) if i not in told}
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
        self._outlet, self._frame = None, _no_frame  # the frame leads back here
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
        passages = [
            Passage(choice, completion, self._frame, outlet, self._arrival)
            for choice, completion in running.items()
        ]
        self._is_passed = True
        try:
            self._arrival.wait(self._seconds_left())
        finally:
            self._is_passed = False
            for passage in passages:
                passage.close()
        outlet.flush()
        for passage in passages:
            if passage.failure is not None:
                raise passage.failure

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


def _no_frame(choice: int, delta: Delta) -> bytes:
    raise AssertionError("nothing is passed on without an outlet")
