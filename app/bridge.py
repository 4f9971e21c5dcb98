"""The seam between the two threads: the hub owns HTTP, one native thread owns the engine.

Hub to engine: a `queue.SimpleQueue` of sequences, and of those that are to end, marked by a flag.
Engine to hub: one append to a deque and one `async_` wake-up per step, then the hub hands out what
came. No gevent object but that watcher is touched from the engine thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import gevent
import gevent.event

from .backlog import Backlog, Place
from .engine_thread import EngineThread
from .engine_thread import State as State
from .errors import Draining, NotReady, UnservableModel
from .off_hub import Kind, Waiter, run
from .pulse import Pulse
from .sequence import Advance, FinishReason, Sequence

if TYPE_CHECKING:
    from .engine import Engine  # brings torch, which the hub does not wait for

log = logging.getLogger(__name__)

# The engine's Python and the hub share the GIL. The default of 5 ms lets every hub turn wait that
# long; measured (DESIGN 6): health p99 falls with it.
_SWITCH_INTERVAL_SECONDS = 0.0005
_DELIVERY_SECONDS = 0.01
_STOP_SECONDS = 1.0  # for the step that runs: nobody waits for it any more
_LOOK_SECONDS = 0.01  # for a thread's end, of which nothing tells the hub

T = TypeVar("T")


class TokenStream:
    """A sequence's advances, on the hub's side, in order and without loss.

    `arrival` is set when there are some; the sequences of one request share it. While there is a
    `passage`, and nothing has arrived, an advance that ends nothing goes there instead. It must not
    wait, nor raise. Without a `bridge` no engine hears of a sequence's end.
    """

    __slots__ = ("sequence", "passage", "_arrived", "_arrival", "_bridge")

    def __init__(
        self, sequence: Sequence, arrival: gevent.event.Event, bridge: Bridge | None = None
    ) -> None:
        self.sequence = sequence
        self.passage: Callable[[Advance], None] | None = None
        self._arrived: list[Advance] = []
        self._arrival = arrival
        self._bridge = bridge

    def take(self) -> list[Advance]:
        """What has come since the last time."""
        advances, self._arrived = self._arrived, []
        return advances

    def put(self, advance: Advance) -> None:
        passage = self.passage
        if passage is not None and advance.finish_reason is None and not self._arrival.is_set():
            passage(advance)
            return
        self._arrived.append(advance)
        self._arrival.set()

    def break_off(self) -> None:
        """Some of it could not be delivered: for its reader it ends with an error."""
        self.end(FinishReason.ABORT)
        self._arrived = [Advance(self.sequence, None, FinishReason.ERROR, "tokens were lost")]
        self._arrival.set()

    def end(self, reason: FinishReason) -> None:
        """No more tokens are wanted: the engine ends the sequence before its next step."""
        if self.sequence.is_finished:
            return
        is_new = self.sequence.ended_by is None
        self.sequence.ended_by = reason
        if is_new and self._bridge is not None:
            self._bridge.end(self.sequence)

    def place(self) -> Place | None:
        """In the queue; None if it does not wait."""
        return self._bridge.place(self.sequence) if self._bridge is not None else None


class Bridge:
    """Runs the engine on its own native thread. All methods are called on the hub.

    `load` builds the engine, on that thread. The hub answers meanwhile, but for the time in which
    ONNX Runtime builds its session: it holds the GIL, longer for a larger model.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        max_step_seconds: float = 60.0,
        backlog: Backlog | None = None,
        max_load_seconds: float = 0.0,
    ) -> None:
        """A load that takes longer than `max_load_seconds` fails; 0 is no limit."""
        self.pulse = Pulse(max_step_seconds)
        self.backlog = backlog or Backlog()
        self._max_load_seconds = max_load_seconds
        self._thread = EngineThread(load, self._post, self.pulse, self.backlog)
        self._outbox: deque[list[Advance] | State] = deque()
        self._streams: dict[Sequence, TokenStream] = {}
        self._wake = gevent.get_hub().loop.async_()
        self.state = State.LOADING
        self._gave_up: UnservableModel | None = None
        self.ended = gevent.event.Event()  # set when the engine thread has stopped or failed
        self._load_limit: gevent.Greenlet | None = None

    @property
    def failure(self) -> BaseException | None:
        """Why the engine cannot be had, or has died."""
        return self._gave_up or self._thread.failure

    @property
    def _engine(self) -> Engine | None:
        return self._thread.engine

    @property
    def is_ready(self) -> bool:
        return self.why_not_ready is None

    @property
    def was_ready(self) -> bool:
        """Has the engine ever produced a token?"""
        return self._engine is not None

    @property
    def why_not_ready(self) -> str | None:
        """None if the engine has produced a token, its work goes on, and neither its last two steps
        nor its last self-test failed."""
        if self._engine is not None and self._engine.has_failed:
            return self.why_not_served or "the last steps of the model have failed"
        return self.why_not_served

    @property
    def why_not_served(self) -> str | None:
        """Why a request would wait in vain; None if the engine would take it up. That its last
        steps have failed is no reason: the next may well succeed."""
        if self.state is State.LOADING:
            return f"the model is loading: {self.pulse.stage}"
        if self.state is not State.READY:
            return f"the model is {self.state.value}"
        if (seconds := self.pulse.stalled_seconds) is not None:
            return f"the model hangs: no progress for {seconds:.0f} s"
        return None

    def check_served(self) -> None:
        """Raises NotReady, or Draining, if a request would wait in vain."""
        if self.state is State.STOPPED:
            raise Draining("the server has stopped")
        if (reason := self.why_not_served) is not None:
            raise NotReady(reason)

    def start(self) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
        self._wake.start(self._deliver)
        self._thread.start()
        if self._max_load_seconds:
            self._load_limit = gevent.spawn_later(self._max_load_seconds, self._give_up_load)

    def submit(self, sequences: list[Sequence]) -> tuple[list[TokenStream], gevent.event.Event]:
        """Their streams, and the event that tells of news in any, of one request. Raises NotReady
        unless the engine runs and gets on, Overloaded if the queue has no room for all."""
        num_prompt_tokens = sum(len(sequence.prompt_ids) for sequence in sequences)
        self.check_room(sequences[0].owner, len(sequences), num_prompt_tokens)
        self.backlog.add(sequences)
        arrival = gevent.event.Event()
        streams = [TokenStream(sequence, arrival, self) for sequence in sequences]
        for stream in streams:
            self._streams[stream.sequence] = stream
            self._thread.submit(stream.sequence)
        return streams, arrival

    def check_room(self, owner: str, num_sequences: int, num_prompt_tokens: int) -> None:
        """Raises what `submit` would, for so many sequences."""
        self.check_served()
        self.backlog.check(owner, num_sequences, num_prompt_tokens)

    def end(self, sequence: Sequence) -> None:
        """Its `ended_by` is set: the engine is told, which does not look at all that wait."""
        self._thread.end(sequence)

    def place(self, sequence: Sequence) -> Place | None:
        """In the queue; None if it does not wait."""
        return self.backlog.place(sequence, self._streams)

    def off_hub(
        self, work: Callable[[], T], kind: Kind = "text", waiter: Waiter | None = None
    ) -> T:
        """`off_hub.run`, for a request, or for the server itself."""
        return run(work, kind, waiter or Waiter())

    def request_stop(self) -> None:
        """Ends every stream now, and the engine thread after its current step; `ended` tells when
        it has.

        A load cannot be interrupted and is not waited for; nor is a step for more than
        `_STOP_SECONDS`.
        """
        if self.state not in (State.LOADING, State.READY):
            return  # a second signal, or a failure that is being told already
        was_loading = self.state is State.LOADING
        self.state = State.STOPPED
        self._thread.stop()
        # A stop is no failure of the model: the client may ask another server.
        self._end_streams(FinishReason.ABORT)
        if was_loading:
            self.ended.set()
        else:
            gevent.spawn_later(_STOP_SECONDS, self.ended.set)

    def give_up(self) -> None:
        """The engine hangs: its streams end with an error now, its thread if it ever goes on."""
        self._end_streams(FinishReason.ERROR, "the model hangs, and is not waited for any more")
        self.request_stop()

    @property
    def num_streams(self) -> int:
        """Sequences that the engine is still to end."""
        return len(self._streams)

    @property
    def has_streams(self) -> bool:
        return bool(self._streams)

    def close(self) -> None:
        """Behind `ended`: waits until the thread has ended, then lets go of the engine."""
        while self._thread.is_alive:
            gevent.sleep(_LOOK_SECONDS)
        self._wake.close()
        self._thread.forget()
        self._gave_up = None

    # --- on the hub, woken by the engine thread -------------------------------------------------

    def _deliver(self) -> None:
        # Steps may come as fast as they are delivered; the hub has others to serve.
        give_way_at = time.monotonic() + _DELIVERY_SECONDS
        while self._outbox:
            item = self._outbox.popleft()
            if isinstance(item, State):
                self._change(item)
                continue
            streams = self._streams
            for advance in item:
                stream = streams.get(advance.sequence)
                if stream is not None:  # the self-test has none
                    if advance.finish_reason is not None:
                        del streams[advance.sequence]
                    _hand_out(stream, advance)
            if time.monotonic() >= give_way_at:
                self._wake.send()  # for the rest
                return

    def _change(self, state: State) -> None:
        if self._load_limit is not None:  # it would keep all this alive
            self._load_limit.kill(block=False)
            self._load_limit = None
        # Behind the end, as of a stop in the load, nothing that comes late is told.
        if not self.ended.is_set() and (self.state is State.LOADING or state is State.FAILED):
            self.state = state
        if state is State.READY:
            return
        if state is State.FAILED:
            self._end_streams(FinishReason.ERROR)
        self._wake.stop()
        self.ended.set()

    def _give_up_load(self) -> None:
        if self.state is State.LOADING:
            self._gave_up = UnservableModel(
                f"the load is not done within {self._max_load_seconds:g} s (MAX_LOAD_SECONDS); "
                f"it is at: {self.pulse.stage}"
            )
            self._thread.stop()  # for the thread, if the load is ever done
            self._change(State.FAILED)

    def _end_streams(self, reason: FinishReason, error: str = "the server has stopped") -> None:
        streams, self._streams = self._streams, {}
        for sequence, stream in streams.items():
            _hand_out(stream, Advance(sequence, None, reason, error))

    # --- on the engine thread ---------------------------------------------------------------------

    def _post(self, item: list[Advance] | State) -> None:
        self._outbox.append(item)
        self._wake.send()


def _hand_out(stream: TokenStream, advance: Advance) -> None:
    """One stream's failure is no other's."""
    try:
        stream.put(advance)
    except BaseException:  # gevent would print it, or end with an exit
        log.exception("request %s: its tokens cannot be delivered", stream.sequence.request_id)
        stream.break_off()
