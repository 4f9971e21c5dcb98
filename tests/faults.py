"""Faults, the places where they can happen, and what must be true behind each of them.

A new place is one line of `PLACES`. `Rig` is a stub service behind real sockets that counts what
was asked and what was told; `check` holds the invariants.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import gevent
import pytest

from app import connection, engine, generate_replies, http, openai_api, scheduler
from app.answer import Answer
from app.backlog import Backlog
from app.bridge import Bridge, State, TokenStream
from app.chat import ChatTemplate
from app.completion import Completion
from app.connection import Connection
from app.departure import Departure
from app.detokenizer import Detokenizer
from app.direct import Outlet
from app.engine_thread import EngineThread
from app.grammar import Grammars
from app.guard import Guard
from app.masks import GrammarConstraint, MaskWorker
from app.metrics import EngineMetrics, Metrics
from app.off_hub import NUM_THREADS
from app.passage import TextEvent
from app.pulse import Pulse
from app.scheduler import Scheduler
from app.sequence import Sequence, StepPlan
from app.stops import StopMatcher
from app.text import TextCodec

from .engines import StubModel, TokenCache, stub_answer
from .services import CODEC, SETTINGS, StubService, hold_until, running, until
from .sockets import serving_of
from .wire import Client

NUM_ROWS = 4
LIMIT_SECONDS = 5.0  # MAX_STEP_SECONDS, on a clock that the test moves
SECRET = "a secret of the inside"
_SPARE_THREADS = sum(NUM_THREADS.values())  # that pools may still start

Ask = tuple[str, dict[str, Any]]
GENERATE: Ask = ("/generate", {"prompt": "a", "max_tokens": 6})
STOPS: Ask = ("/generate", {"prompt": "a", "max_tokens": 6, "stop": ["never said"]})
STREAM: Ask = ("/generate", {"prompt": "a", "max_tokens": 6, "stream": True})
HELD: Ask = ("/generate", {"prompt": "a", "max_tokens": 6, "regex": "[!-Z]{20}"})
CHAT: Ask = (
    "/v1/chat/completions",
    {"model": "stub", "messages": [{"role": "user", "content": "a"}], "max_tokens": 6},
)
LONG_TEXT: Ask = ("/tokenize", {"prompt": "a " * 5000})
TIMED: Ask = ("/generate", {"prompt": "a", "max_tokens": 6, "timeout_ms": 20_000})


# --- faults ---------------------------------------------------------------------------------------


class Panic(BaseException):
    """As a panic in Rust is: no Exception."""


def raises(error: Callable[[], BaseException]) -> Callable[[Callable[[], Any]], Any]:
    def fault(real: Callable[[], Any]) -> Any:
        raise error()

    return fault


def half(real: Callable[[], Any]) -> Any:
    """Raises behind what it should do."""
    real()
    raise RuntimeError(SECRET)


def slow(real: Callable[[], Any]) -> Any:
    time.sleep(0.03)
    return real()


FAULTS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "raises": raises(lambda: RuntimeError(SECRET)),
    "half": half,
    "no memory": raises(lambda: MemoryError(SECRET)),
    "slow": slow,
    "panic": raises(lambda: Panic(SECRET)),
    "exit": raises(lambda: SystemExit(SECRET)),
    "interrupt": raises(lambda: KeyboardInterrupt(SECRET)),
}
DEADLY = ("panic", "exit", "interrupt")  # no Exceptions: they end an engine thread
HARMLESS = ("slow",)


class Trap:
    """Makes one call of `owner.name` fail, the one after `skip` others, or all from there on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self._fault: Callable[[Callable[[], Any]], Any] | None = None
        self._calls = itertools.count()
        self._skip, self._is_for_ever = 0, False
        self.has_sprung = False
        real = getattr(owner, name)

        def faulty(*arguments: Any, **options: Any) -> Any:
            def call() -> Any:
                return real(*arguments, **options)

            fault = self._fault
            if fault is None:
                return call()
            number = next(self._calls)
            if number < self._skip or (number > self._skip and not self._is_for_ever):
                return call()
            self.has_sprung = True
            return fault(call)

        monkeypatch.setattr(owner, name, faulty)

    def set(
        self, fault: Callable[[Callable[[], Any]], Any], skip: int = 0, *, is_for_ever: bool = False
    ) -> None:
        self._calls = itertools.count()
        self._fault, self._skip, self._is_for_ever = fault, skip, is_for_ever

    def free(self) -> None:
        self._fault = None


# --- places ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """`owner.name` is what fails, at its call number `skip`, when `ask` comes by."""

    owner: Any
    name: str
    ask: Ask = GENERATE
    skip: int = 0
    is_engine: bool = False  # on the engine thread
    is_told: bool = True  # an Exception costs the client its answer
    is_cut: bool = False  # likewise, and it cannot be told
    is_counted: bool = True  # metrics are right behind it
    is_late: bool = False  # the tokens have all come by then
    code: str = "internal_error"  # that the client is told
    is_deadly: bool = False  # whatever fails there ends the engine thread
    is_direct: bool = False  # a callback of the hub's: a panic there is the delivery's failure


def on_engine(owner: Any, name: str, *more: Any, **options: Any) -> Place:
    return Place(owner, name, *more, is_engine=True, code="model_failure", **options)


PLACES: dict[str, Place] = {
    "moves": on_engine(TokenCache, "apply"),
    "prefill": on_engine(StubModel, "forward"),
    "decode": on_engine(StubModel, "forward", GENERATE, 2),
    "mask start": on_engine(MaskWorker, "start", HELD, 1),
    "mask collect": on_engine(MaskWorker, "collect", HELD, 1),
    "accept": on_engine(GrammarConstraint, "accept", HELD, 1),
    "sampler": on_engine(engine, "sample", GENERATE, 1),
    "commit": on_engine(Scheduler, "commit", GENERATE, 1),
    "append": on_engine(scheduler, "append", GENERATE, 1),
    "stepped": on_engine(Metrics, "stepped", is_told=False, is_counted=False),
    "advanced": on_engine(Metrics, "advanced", is_told=False, is_counted=False),
    "finished": on_engine(Metrics, "finished", is_told=False, is_counted=False),
    "counted": on_engine(EngineMetrics, "counted", is_told=False),
    "limited": on_engine(EngineMetrics, "limited", is_told=False),
    "planned": on_engine(Backlog, "planned", is_told=False),
    "stepped, backlog": on_engine(Backlog, "stepped", is_told=False),
    "finished, backlog": on_engine(Backlog, "finished", is_told=False),
    "post": on_engine(EngineThread, "_tell", is_deadly=True),
    "key": Place(Guard, "check"),
    "room": Place(Backlog, "check"),
    "delivery": Place(TokenStream, "put", GENERATE, 1, code="model_failure"),
    "encode": Place(TextCodec, "encode"),
    "encode off hub": Place(TextCodec, "encode", LONG_TEXT),
    "template": Place(ChatTemplate, "render", CHAT),
    "grammar": Place(Grammars, "regex", HELD),
    "submit": Place(Bridge, "submit"),
    "choice": Place(Completion, "__init__"),
    "stop strings": Place(StopMatcher, "__init__", STOPS),
    "deadline": Place(Answer, "_look_at_deadline", TIMED),
    "departure": Place(Departure, "watch"),
    "new answer": Place(Departure, "call"),
    "detokenizer": Place(Detokenizer, "feed", GENERATE, 1),
    "stop matcher": Place(StopMatcher, "feed", STOPS, 1),
    "framing": Place(generate_replies, "result"),
    "first event": Place(generate_replies, "event", STREAM),
    "later event": Place(TextEvent, "frame", STREAM, 1, is_direct=True),
    "last event": Place(generate_replies, "event", STREAM, 2, is_late=True),
    "summary": Place(http, "summary", is_late=True),
    "summary, stream": Place(http, "summary", STREAM, is_told=False),
    "reply": Place(openai_api, "ChatReply", CHAT),
    "headers": Place(Connection, "finalize_headers", is_cut=True, is_late=True),
    "write": Place(Connection, "_send", is_cut=True, is_late=True),
    "later write": Place(Outlet, "send", STREAM, 1, is_direct=True),
    "last write": Place(Connection, "_send", STREAM, 2, is_cut=True, is_late=True),
    "access log": Place(connection, "tell", is_told=False),
}


# --- the service, and what it was asked -----------------------------------------------------------


class Ending(NamedTuple):
    """What a client was told: a status, and the code of an error in the body or in an event."""

    status: int | None  # None: the connection was closed without a word
    code: str | None
    text: str | None
    is_whole: bool  # not cut off


class Log(logging.Handler):
    """Of the app, as text: a record would keep alive what failed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []  # logger, text

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.name, self.format(record)))
        record.exc_info = None  # for whoever keeps records; the text is theirs already


class Rig:
    """A service behind real sockets. It counts what was asked, what was told, and what there is of
    all that can leak."""

    def __init__(self, service: StubService, server: Any, clock: SimpleNamespace) -> None:
        self.service = service
        self.server = server
        self.clock = clock
        self.log = Log()
        self.sequences: list[Sequence] = []  # that the engine took
        self.answers: list[Answer] = []
        self.endings: list[Ending] = []
        self.num_requests = 0
        self._counted: Counter[str] = Counter()
        self._most: tuple[int, ...] = ()

    @property
    def port(self) -> int:
        return int(self.server.server_port)

    @property
    def scheduler(self) -> Any:
        bridge: Any = self.service.bridge
        return bridge._engine._scheduler

    def send(self, client: Client, ask: Ask = GENERATE, **more: Any) -> None:
        self.num_requests += 1
        client.send(ask[0], **(ask[1] | more))

    def read(self, client: Client) -> Ending:
        with gevent.Timeout(60):
            self.endings.append(ending := _read(client))
        return ending

    def ask(self, ask: Ask = GENERATE, **more: Any) -> Ending:
        with Client(self.port) as client:
            self.send(client, ask, **more)
            return self.read(client)

    @contextmanager
    def hold_until_submitted(self, num_sequences: int) -> Iterator[None]:
        """The engine, which is idle, takes no step until it has so many: who runs beside whom does
        not depend on how soon clients get a turn."""
        until(self.is_quiet)
        bridge: Any = self.service.bridge
        engine, num_before = bridge._engine, len(self.sequences)

        def are_all_there() -> bool:  # it is asked where the engine would take up more
            return len(self.sequences) - num_before + bridge._thread._inbox.qsize() >= num_sequences

        def step() -> Any:
            hold_until(are_all_there)
            del engine.step  # from here on it is its own again
            return engine.step()

        engine.step = step
        try:
            yield
        finally:
            vars(engine).pop("step", None)

    def send_timed(self, client: Client, ask: Ask, milliseconds: int) -> None:
        """With the header that every route knows."""
        self.num_requests += 1
        path, body = ask
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"X-Request-Timeout: {milliseconds / 1000}\r\n"
        client.socket.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)

    def sequences_run(self) -> bool:
        return not all(sequence.is_finished for sequence in self.sequences)

    def recover_rows(self) -> None:
        """As many as at first, which memory that ran out has made fewer."""
        self.scheduler._limit.value = NUM_ROWS

    def get(self, path: str) -> int:
        with Client(self.port) as client:
            client.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            return client.read()[0]

    def count(self, name: str) -> int:
        """Of all labels, since `begin`."""
        return self._count(name) - self._counted[name]

    def begin(self) -> None:
        """From here on it counts."""
        self.sequences.clear()
        self.answers.clear()
        self.endings.clear()
        self.log.lines.clear()
        self.service.stub.plans.clear()
        self.service.stub.change = lambda plan, logits: None
        self.num_requests = 0
        for name in ("request_success_total", "requests_rejected_total"):
            self._counted[name] = self._count(name)

    def has_read(self) -> bool:
        """All that the engine has said was taken up."""
        answers = [getattr(answer, "completions", ()) for answer in self.answers]
        read = {choice.sequence: choice.num_tokens for choices in answers for choice in choices}
        return all(
            sequence.is_finished
            or sequence.ended_by is not None
            or read.get(sequence, -1) >= len(sequence.output_ids)
            for sequence in self.sequences
        )

    def settle(self) -> None:
        """What there is now may stay."""
        until(self.is_quiet)
        gevent.sleep(0.01)  # sockets stop their watchers a turn later
        self._most = (_files(), _watchers(), _threads() + _SPARE_THREADS)

    def _check_no_more(self) -> None:
        """No file, watcher or timer of the loop, or thread, than when it settled."""
        for _ in range(10_000):  # no `until`: its own timers would be counted
            now = _files(), _watchers(), _threads()
            if all(map(int.__le__, now, self._most)):
                return
            gevent.sleep(0.002)
        raise AssertionError(f"files, watchers, threads: {now}, at most {self._most}")

    def is_quiet(self) -> bool:
        """No connection, nothing that waits or runs, and nothing between the threads."""
        bridge: Any = self.service.bridge
        is_dead = bridge.state is not State.READY
        return not (
            len(self.server.pool)
            or self.server.open
            or self.service.drain.num_open
            or bridge._streams
            or bridge._outbox
            or not (is_dead or not bridge._thread.has_inbox)
            or not (is_dead or bridge._engine.is_idle)
        )

    def check(
        self, *, is_counted: bool = True, is_logged: bool = True, is_told: bool = True
    ) -> None:
        """What must be true behind everything. A dead engine is held to all but its own part."""
        until(self.is_quiet)
        is_dead = self.service.bridge.state is not State.READY
        scheduler = self.scheduler
        if not is_dead:
            assert not (scheduler._waiting or scheduler.num_running or scheduler._ended)
            assert all(sequence.is_finished for sequence in self.sequences)
            if is_counted:
                assert self.count("request_success_total") == len(self.sequences)
        if is_counted and is_told:
            told = [ending for ending in self.endings if ending.code is not None]
            assert self.count("requests_rejected_total") == len(told)
        if is_logged:
            lines = [text for name, text in self.log.lines if name == "app.access"]
            posts = [line for line in lines if "method=POST" in line]
            assert len(posts) == self.num_requests
        assert all(answer._timer is None for answer in self.answers)
        self._check_no_more()
        self.sequences.clear()
        self.answers.clear()
        self.service.stub.plans.clear()
        self.service.stub.change = lambda plan, logits: None
        if not is_dead:  # its scheduler keeps what it had
            assert _live() == []

    def check_serves(self) -> None:
        """All rows run at once, and say what they should; then it is ready."""
        self.begin()
        prompt = CODEC.encode("abc")
        text = CODEC.detokenizer().feed(stub_answer(prompt, 8), is_last=True)
        streams = self.service.bridge._streams

        def wait_for_all(plan: StepPlan, logits: object) -> None:
            if not plan.decode:
                hold_until(lambda: len(streams) == NUM_ROWS)

        self.service.stub.change = wait_for_all
        ending = self.ask(("/generate", {"prompt": "abc", "n": NUM_ROWS, "max_tokens": 8}))
        assert ending == Ending(200, None, text, True)
        assert max(len(plan.decode) for plan in self.service.stub.plans) == NUM_ROWS
        assert (self.get("/health/live"), self.get("/health/ready")) == (200, 200)
        self.check()

    def _count(self, name: str) -> int:
        samples = (s for family in self.service.registry.collect() for s in family.samples)
        return int(sum(s.value for s in samples if s.name == f"phi_serve_{name}"))


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _watchers() -> int:
    return int(gevent.get_hub().loop.activecnt)


def _live() -> list[Any]:
    gc.collect()
    kinds = (Sequence, Answer, Completion, TokenStream)
    found = [each for each in gc.get_objects() if isinstance(each, kinds)]
    return [each for each in found if id(each) not in _buried]


_buried: set[int] = set()


def bury() -> None:
    """What there is, a dead engine keeps: it is not looked at any more."""
    _buried.update(map(id, _live()))


def _read(client: Client) -> Ending:
    try:
        status, body = client.read()
    except (IndexError, KeyError, OSError, ValueError):  # nothing, or less than was announced
        return Ending(None, None, None, False)
    assert SECRET.encode() not in body
    if not body.startswith((b"data: ", b": ")):
        reply = json.loads(body)
        error = reply.get("error")
        return Ending(status, error and error["code"], reply.get("text"), True)
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    *before, last = events
    assert not any("error" in event or "usage" in event for event in before), "ended twice"
    error = last.get("error")
    text = "".join(event.get("text", "") for event in events if event.get("index", 0) == 0)
    return Ending(status, error and error["code"], text, error is not None or "usage" in last)


@contextmanager
def rigged(
    service: StubService | None = None, warm: Ordered[Ask] = (GENERATE, HELD, CHAT, LONG_TEXT)
) -> Iterator[Rig]:
    """It runs inside; it may have died at the end. `warm` makes what is made once, and stays."""
    clock = SimpleNamespace(now=1000.0)
    service = service or StubService(replace(SETTINGS, max_batch_size=NUM_ROWS))
    service.bridge._thread.pulse = Pulse(LIMIT_SECONDS, lambda: clock.now)
    with (
        pytest.MonkeyPatch.context() as patch,
        running(service),
        serving_of(service) as server,
    ):
        rig = Rig(service, server, clock)
        add, answer = Scheduler.add, Answer.__init__

        def added(scheduler: Scheduler, sequence: Sequence) -> None:
            add(scheduler, sequence)
            if sequence.request_id != "self-test":
                rig.sequences.append(sequence)

        def answering(self: Answer, *arguments: Any) -> None:
            rig.answers.append(self)
            self._timer = None
            answer(self, *arguments)

        patch.setattr(Scheduler, "add", added)
        patch.setattr(Answer, "__init__", answering)
        logger = logging.getLogger("app")
        level = logger.level
        logger.setLevel("INFO")
        logger.addHandler(rig.log)
        try:
            for ask in warm:
                assert rig.ask(ask).status == 200
            until(rig.is_quiet)
            rig.begin()
            yield rig
        finally:
            logger.removeHandler(rig.log)
            logger.setLevel(level)
