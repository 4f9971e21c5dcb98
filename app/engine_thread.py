"""An engine on a native thread of its own: takes sequences in, steps, posts what a step brought.

Other threads reach it by a `queue.SimpleQueue`; what it posts goes to whoever made it, on this
thread. Knows nothing of hubs: `bridge.py` brings what it posts to one, `triton_backend.py` to
Triton.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import garbage
from .backlog import Backlog
from .pulse import Pulse
from .sequence import Advance, Sequence

if TYPE_CHECKING:
    from .engine import Engine  # brings torch, which the hub does not wait for

log = logging.getLogger(__name__)

_IDLE_TEST_SECONDS = 30.0
_RETEST_SECONDS = 1.0


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class _Ended:
    """In the inbox: a sequence that lies in front of it, and has a reason to end now."""

    sequence: Sequence


class EngineThread:
    """`load` builds the engine, on the thread. `post` hears of each change of its state, and of
    each step's advances; it must not wait."""

    def __init__(
        self,
        load: Callable[[], Engine],
        post: Callable[[list[Advance] | State], None],
        pulse: Pulse,
        backlog: Backlog,
    ) -> None:
        self.engine: Engine | None = None  # once it has produced a token
        self.failure: BaseException | None = None
        self._load = load
        self._post = post
        self._pulse = pulse
        self._backlog = backlog
        self._inbox: queue.SimpleQueue[Sequence | _Ended | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        self._inbox.put(sequence)

    def end(self, sequence: Sequence) -> None:
        """Its `ended_by` is set: the engine is told, which does not look at all that wait."""
        self._inbox.put(_Ended(sequence))

    def stop(self) -> None:
        """After its current step; a load is not interrupted."""
        self._inbox.put(None)

    @property
    def has_inbox(self) -> bool:
        """Is there something that it has not taken in yet?"""
        return not self._inbox.empty()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Waits so long at most. Not on a hub."""
        self._thread.join(seconds)

    def forget(self) -> None:
        """It has ended: lets go of all that was loaded, and of who was told."""
        self.engine = self.failure = None
        self._post = _nobody

    def _run(self) -> None:
        try:
            engine = self._load()
            engine.backlog = self._backlog
            self._pulse.enter("warming up")
            engine.self_test()
            self.engine = engine
            garbage.freeze()
            self._post(State.READY)
            while self._take_in(engine):
                self._step(engine)
            self._post(State.STOPPED)
        except BaseException as error:
            if self.engine is not None:
                log.critical("the engine thread has died", exc_info=error)
            self.failure = error
            self._post(State.FAILED)

    def _step(self, engine: Engine) -> None:
        num_steps = engine.num_steps
        advances = engine.step()
        if engine.num_steps > num_steps:
            self._pulse.beat()
        if advances:
            self._post(advances)

    def _take_in(self, engine: Engine) -> bool:
        """Hands the engine what has come, waiting for it if it is idle; False to stop."""
        while True:
            try:
                item = self._wait(engine) if engine.is_idle else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, _Ended):
                engine.end(item.sequence)
            else:
                engine.submit(item)
            del item  # or the wait for the next would keep it alive

    def _wait(self, engine: Engine) -> Sequence | _Ended | None:
        """What comes next; Empty after a self-test, for without requests nothing else would show
        that the model works, or works again. It is a step of one token: nobody waits longer. Empty,
        too, where memory was given back."""
        self._pulse.rest()
        timeout = _RETEST_SECONDS if engine.has_failed else _IDLE_TEST_SECONDS
        rest_in = engine.seconds_to_rest
        is_rest_due = rest_in is not None and rest_in <= timeout
        try:
            return self._inbox.get(timeout=rest_in if is_rest_due else timeout)
        except queue.Empty:
            self._pulse.beat()
            with suppress(RuntimeError):
                engine.rest() if is_rest_due else engine.self_test()
            raise
        finally:
            self._pulse.beat()


def _nobody(item: list[Advance] | State) -> None:
    """Hears what is posted once nobody is interested."""
