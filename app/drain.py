"""From the first signal to the exit: not ready at once, refusing later, ended when all is done.

Belongs to the hub. It counts the requests that carry work (POST) from their head to the last byte
of their answer, and so knows of what the engine does not: prompts in the tokenizer, answers being
written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import gevent
import gevent.event

from .bridge import State
from .closing import call_closing
from .errors import Draining

log = logging.getLogger(__name__)


class Work(Protocol):
    """What ends: a bridge, or all of a service's."""

    @property
    def state(self) -> State: ...
    def request_stop(self) -> None: ...


class Drain:
    """`pre_drain_seconds`: how long requests are still taken after the signal, for whoever routes
    them takes time to hear of it. `drain_seconds`: how long then the last of them may run."""

    def __init__(
        self,
        work: Work,
        pre_drain_seconds: float,
        drain_seconds: float,
        sleep: Callable[[float], object] = gevent.sleep,
    ) -> None:
        self.announced = gevent.event.Event()  # not ready any more
        self.is_closed = False  # no request is taken any more
        self._has_ended = False  # what is open still is cut short
        self._work = work
        self._pre_drain_seconds = pre_drain_seconds
        self._drain_seconds = drain_seconds
        self._sleep = sleep
        self.num_open = 0
        self.num_refused = self.num_cut_short = 0
        self._num_closed = 0  # since the signal
        self._all_done = gevent.event.Event()
        self._all_done.set()

    @property
    def is_announced(self) -> bool:
        return bool(self.announced.is_set())

    def hear(self) -> None:
        """A signal to end. The second one ends at once; so does the first if nothing runs yet."""
        if self.is_announced or self._work.state is not State.READY:
            log.info("ending at once, %d requests open", self.num_open)
            self._end()
            return
        self.announced.set()
        log.info("draining, %d requests open; a second signal ends at once", self.num_open)
        gevent.spawn(self._run)

    def check(self) -> None:
        """Raises Draining if no request is taken any more."""
        if self.is_closed:
            self.num_refused += 1
            raise Draining("the server is draining: it ends, and takes no more requests")

    @property
    def num_finished(self) -> int:
        """Since the signal, those refused not counted."""
        return max(0, self._num_closed - self.num_refused)

    def counting(self, app: Any) -> Any:
        """A WSGI app: `app`, its requests counted until their answers are closed."""

        def counted(environ: dict[str, Any], start_response: Any) -> Any:
            if environ["REQUEST_METHOD"] != "POST":
                return app(environ, start_response)
            self._open()
            return call_closing(app, environ, start_response, self._close)

        return counted

    def _run(self) -> None:
        self._sleep(self._pre_drain_seconds)
        self.is_closed = True
        if not self._all_done.wait(self._drain_seconds):
            log.warning("%d requests are not done in time and end with an error", self.num_open)
        self._end()

    def _end(self) -> None:
        if not self._has_ended:
            self.num_cut_short = self.num_open
        self.announced.set()
        self.is_closed = self._has_ended = True
        self._work.request_stop()

    def _open(self) -> None:
        self.num_open += 1
        self._all_done.clear()

    def _close(self) -> None:
        self.num_open -= 1
        if self.is_announced and not self._has_ended:
            self._num_closed += 1
        if self.num_open == 0:
            self._all_done.set()
