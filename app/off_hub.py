"""Work off the hub: on native threads, for a request that waits for it.

Each kind of work has its own threads, so that it waits for its like only: a grammar may take
seconds, a text milliseconds. How many may wait is bounded, and who has left waits no more. Belongs
to the hub.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, Literal, TypeVar, cast

import gevent
from gevent.threadpool import ThreadPool

from .departure import Departure
from .errors import DeadlineExceeded, Overloaded

Kind = Literal["text", "template", "grammar"]
NUM_THREADS: dict[Kind, int] = {"text": 4, "template": 2, "grammar": 2}
MAX_WAITING = 256  # for the threads of one kind; of one API key half as many
_WEIGHT = 1 / 16  # of the last work in the mean

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiter:
    """The request that waits: its client, its key's name, and when its time is over, of
    `time.monotonic`."""

    departure: Departure = field(default_factory=Departure)
    owner: str = ""
    deadline_at: float | None = None


def run(work: Callable[[], T], kind: Kind, waiter: Waiter) -> T:
    """The result of `work`, run on a thread of its kind; the hub turns meanwhile.

    Raises Overloaded if too much waits for one, DeadlineExceeded, ClientLeft. Work that waits for a
    thread then never begins; what runs cannot be stopped: it keeps its thread, and its result is
    dropped.
    """
    waiter.departure.check()
    threads, job = _threads(kind), _Job(work)
    left = None
    if waiter.deadline_at is not None:
        left = max(0.0, waiter.deadline_at - time.monotonic())
    late = DeadlineExceeded("the request's time was over before its first token")
    with (
        threads.waiting(waiter.owner),
        job.wanted(),
        gevent.Timeout(left, late),
        waiter.departure.raising(),
    ):
        threads.pool.spawn(job.run).get()
    threads.took(job.seconds)
    return job.result()


class _Job(Generic[T]):
    """Runs on the thread, unless nobody wants it any more."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.seconds = 0.0
        self._work = work
        self._is_wanted = True
        self._result: T | None = None
        self._error: BaseException | None = None

    @contextmanager
    def wanted(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._is_wanted = False

    def run(self) -> None:
        if not self._is_wanted:
            return
        started_at = time.perf_counter()
        try:
            self._result = self._work()
        except BaseException as error:  # gevent would print it, a client's mistake or not
            self._error = error
        self.seconds = time.perf_counter() - started_at

    def result(self) -> T:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return cast(T, self._result)


class _Threads:
    """Of one kind, and who waits for one."""

    def __init__(self, kind: Kind) -> None:
        self.pool = ThreadPool(NUM_THREADS[kind])
        self._kind = kind
        self._seconds = 0.0  # that work took on average
        self._num_open: Counter[str] = Counter()  # by owner, those that have a thread among them

    @contextmanager
    def waiting(self, owner: str) -> Iterator[None]:
        """Raises Overloaded."""
        self._check(owner)
        self._num_open[owner] += 1
        try:
            yield
        finally:
            self._num_open[owner] -= 1
            if not self._num_open[owner]:
                del self._num_open[owner]

    def took(self, seconds: float) -> None:
        weight = _WEIGHT if self._seconds else 1.0
        self._seconds += weight * (seconds - self._seconds)

    def _check(self, owner: str) -> None:
        num_threads = NUM_THREADS[self._kind]
        num = max(0, self._num_open.total() - num_threads)
        own = self._num_open.get(owner, 0) - num_threads if owner else 0
        if num < MAX_WAITING and own < MAX_WAITING // 2:
            return
        seconds = num * self._seconds / num_threads
        of_one_key = f", of one API key {MAX_WAITING // 2}" if owner else ""
        raise Overloaded(
            f"the server is overloaded: {num} requests wait for its {self._kind} threads; at most "
            f"{MAX_WAITING} may{of_one_key}. What is in front takes about {seconds:.0f} s",
            num + 1,
            num,
            seconds,
        )


@cache
def _threads(kind: Kind) -> _Threads:
    return _Threads(kind)
