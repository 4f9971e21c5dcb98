"""Sends requests over raw sockets from one event loop, and stamps what comes back.

The client shares the machine with the server that it measures, so it is one thread with epoll and
no framework; `Run.cpu_share` says what it cost all the same. Who sends what and when comes in as
generators ("users"): each yields a Request and is sent the Answer. Connections are kept alive and
pooled; a request never waits for one. Clock: time.perf_counter, in seconds.
"""

import heapq
import json
import selectors
import socket
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from http_reader import BadAnswer, ResponseReader, take_events

TIMEOUT_SECONDS = 300  # of silence: a server that hangs must not hang the benchmark
RETRY_SECONDS = 1.0  # behind a 429 without Retry-After


class RequestFailed(Exception):
    """The server answered, but not with what was asked for. `kind` groups it in the report."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Answer:
    """One request as the client saw it; `failure` says why it does not count, `kind` its sort."""

    sent_at: float
    done_at: float = 0.0
    text_at: list[float] = field(default_factory=list)  # of every event that carries text
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failure: str = ""
    kind: str = ""
    planned_at: float | None = None  # open loop: when it should have been sent
    turn: int = 1  # of its conversation
    wanted_prompt_tokens: int = 0  # 0: any number is right
    num_429: int = 0  # refusals with this status, the retried ones included
    text: str = ""
    finish_reason: str | None = None

    @property
    def begun_at(self) -> float:
        """What latencies count from: a client that is late hides no waiting."""
        return self.sent_at if self.planned_at is None else self.planned_at


@dataclass(frozen=True)
class Request:
    """`payload` is head and body as sent; `read` puts one JSON object of the answer into it."""

    payload: bytes
    read: Callable[[dict[str, Any], Answer], None]
    check: Callable[[Answer], None]  # raises RequestFailed if the whole is not what was asked for
    turn: int = 1
    wanted_prompt_tokens: int = 0


User = Generator[Request, Answer, None]


class Run(list[Answer]):
    """The answers of one run, and the share of one core that the client took meanwhile."""

    cpu_share = 0.0


class Exchange:
    """A request under way on a connection of its own, which it leaves when the answer is whole."""

    def __init__(self, request: Request, user: User, answer: Answer) -> None:
        self.request, self.user, self.answer = request, user, answer
        self.socket: socket.socket | None = None
        self.unsent = memoryview(request.payload)
        self.is_reused = False  # the connection
        self.has_heard = False
        self.reader = ResponseReader()
        self.heard_at = answer.sent_at
        self._rest = b""
        self._whole: list[bytes] = []  # of an answer that is no stream

    def receive(self, data: bytes, now: float) -> None:
        """Raises: BadAnswer, RequestFailed, ValueError: not JSON"""
        self.heard_at = now
        self.has_heard = self.has_heard or bool(data)
        body = self.reader.feed(data) if data else self.reader.end() or b""
        if self.reader.status == 200 and self.reader.is_stream:
            events, self._rest = take_events(self._rest + body)
            for event in events:
                known = len(self.answer.text)
                self.request.read(event, self.answer)
                if len(self.answer.text) > known:
                    self.answer.text_at.append(now)
        elif body:
            self._whole.append(body)
        if self.reader.is_done:
            self._finish(b"".join(self._whole))

    def _finish(self, whole: bytes) -> None:
        if (status := self.reader.status) != 200:
            shown = whole.decode(errors="replace")[:200].strip()
            raise RequestFailed(f"http_{status}", f"HTTP {status}: {shown}")
        if not self.reader.is_stream:
            self.request.read(json.loads(whole), self.answer)
        self.request.check(self.answer)


class LoadClient:
    """Drives users against one server until all have ended. Use as a context manager."""

    def __init__(self, url: str, retry_429: bool = False, timeout: float = TIMEOUT_SECONDS) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._retry_429, self._timeout = retry_429, timeout
        self._selector = selectors.DefaultSelector()
        self._idle: list[socket.socket] = []
        self._active: set[Exchange] = set()
        self._order = count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def __enter__(self) -> "LoadClient":
        return self

    def __exit__(self, *_: object) -> None:
        """An interrupted run leaves its requests: the server sees their clients go."""
        for exchange in list(self._active):
            self._drop(exchange)
        for idle in self._idle:
            idle.close()
        self._selector.close()

    def run(self, users: Iterable[tuple[float | None, User]]) -> float:
        """Start each user at its instant (None: now, counted from its own sends); run them all.

        Returns: the share of one core that this thread took.
        """
        began_at, cpu = time.perf_counter(), time.thread_time()
        for at, user in users:
            planned = None if at is None else began_at + at
            self._at(planned or began_at, lambda u=user, p=planned: self._advance(u, None, p))
        while self._due or self._active:
            self._turn()
        return (time.thread_time() - cpu) / max(time.perf_counter() - began_at, 1e-9)

    def _turn(self) -> None:
        longest = min(1.0, self._timeout)
        wait = self._due[0][0] - time.perf_counter() if self._due else longest
        for key, _ in self._selector.select(min(longest, max(0.0, wait))):
            self._proceed(key.data)
        now = time.perf_counter()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        for exchange in [e for e in self._active if now - e.heard_at > self._timeout]:
            self._fail(exchange, "timeout", f"nothing heard for {self._timeout:g} s")

    def _at(self, instant: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (instant, next(self._order), action))

    def _advance(self, user: User, answer: Answer | None, planned_at: float | None = None) -> None:
        """Hand a user its answer and send what it asks for next."""
        try:
            request = next(user) if answer is None else user.send(answer)
        except StopIteration:
            return
        new = Answer(time.perf_counter(), planned_at=planned_at, turn=request.turn)
        new.wanted_prompt_tokens = request.wanted_prompt_tokens
        self._send(Exchange(request, user, new))

    def _send(self, exchange: Exchange) -> None:
        self._active.add(exchange)
        try:
            idle = self._take_idle()
            exchange.is_reused = idle is not None
            exchange.socket = idle or self._open()
            self._selector.register(exchange.socket, selectors.EVENT_WRITE, exchange)
        except OSError as error:
            self._fail(exchange, "connection", f"{type(error).__name__}: {error}")

    def _take_idle(self) -> socket.socket | None:
        while self._idle:
            idle = self._idle.pop()
            with suppress(BlockingIOError):
                with suppress(ConnectionError):
                    idle.recv(1, socket.MSG_PEEK)
                idle.close()  # it has ended, or says what nobody asked for
                continue
            return idle
        return None

    def _open(self) -> socket.socket:
        new = socket.socket(socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET)
        new.setblocking(False)
        new.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        new.connect_ex(self._address)  # writable once it is open; a refusal shows in the send
        return new

    def _proceed(self, exchange: Exchange) -> None:
        """The socket can be written to, or has something to read."""
        assert exchange.socket is not None
        try:
            if exchange.unsent:
                sent = exchange.socket.send(exchange.unsent)
                exchange.unsent = exchange.unsent[sent:]
                if not exchange.unsent:
                    self._selector.modify(exchange.socket, selectors.EVENT_READ, exchange)
                return
            data = exchange.socket.recv(65536)
            exchange.receive(data, time.perf_counter())
        except BlockingIOError:
            return
        except RequestFailed as failed:
            self._fail(exchange, failed.kind, str(failed))
        except (OSError, BadAnswer) as error:
            if exchange.is_reused and not exchange.has_heard:
                return self._send_anew(exchange)
            self._fail(exchange, "connection", f"{type(error).__name__}: {error}")
        except Exception as error:  # whatever it was, this request failed and the others go on
            self._fail(exchange, "bad_answer", f"{type(error).__name__}: {error}")
        else:
            if exchange.reader.is_done:
                self._finish(exchange)

    def _send_anew(self, exchange: Exchange) -> None:
        """The server closed a kept-alive connection as the request went out: nobody's failure."""
        self._drop(exchange)
        for idle in self._idle:  # of the same age
            idle.close()
        self._idle.clear()
        self._send(Exchange(exchange.request, exchange.user, exchange.answer))

    def _fail(self, exchange: Exchange, kind: str, failure: str) -> None:
        exchange.answer.kind, exchange.answer.failure = kind, failure
        self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        answer, reader = exchange.answer, exchange.reader
        answer.done_at = time.perf_counter()
        if reader.is_done and reader.keeps_alive and exchange.socket is not None:
            self._selector.unregister(exchange.socket)
            self._idle.append(exchange.socket)
            self._active.discard(exchange)
        else:  # half an answer may be left in it
            self._drop(exchange)
        if answer.kind == "http_429":
            answer.num_429 += 1
            if self._retry_429 and answer.done_at - answer.begun_at < self._timeout:
                return self._send_later(exchange)
        self._advance(exchange.user, answer)

    def _send_later(self, exchange: Exchange) -> None:
        """Again once the server said so; the latency still counts from the first time."""
        answer = exchange.answer
        try:
            seconds = float(exchange.reader.headers.get("retry-after", RETRY_SECONDS))
        except ValueError:  # an HTTP date
            seconds = RETRY_SECONDS
        answer.kind = answer.failure = ""

        def again() -> None:
            retry = Exchange(exchange.request, exchange.user, answer)
            retry.heard_at = time.perf_counter()
            self._send(retry)

        self._at(answer.done_at + seconds, again)

    def _drop(self, exchange: Exchange) -> None:
        self._active.discard(exchange)
        if exchange.socket is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(exchange.socket)
            exchange.socket.close()
