"""Work off the hub: who may wait for a thread, and that who has left waits no more."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gevent
import pytest
from gevent import socket

from app.departure import Departure
from app.errors import ClientLeft, Overloaded
from app.off_hub import MAX_WAITING, NUM_THREADS, Waiter, _Job, run

from .services import StubService, running, until
from .sockets import Client, post, serving_of

KIND = "grammar"


@contextmanager
def busy() -> Iterator[threading.Event]:
    """All threads of the kind are, until the event is set, or to the end of the block."""
    go_on, has_begun = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        has_begun.release()
        go_on.wait(60)

    jobs = [gevent.spawn(run, hold, KIND, Waiter()) for _ in range(NUM_THREADS[KIND])]
    try:
        for _ in jobs:
            until(lambda: has_begun.acquire(blocking=False))
        yield go_on
    finally:
        go_on.set()
        gevent.joinall(jobs, timeout=60, raise_error=True)


def spawn(work: Callable[[], Any], waiter: Waiter) -> Any:
    job = gevent.Greenlet(run, work, KIND, waiter)
    job.start()
    gevent.sleep(0)
    return job


def test_client_that_leaves_while_it_waits_is_told_at_once_and_its_work_never_begins() -> None:
    ours, theirs = socket.socketpair()
    begun: list[str] = []
    with ours, Departure(ours) as departure:
        departure.watch()
        with busy() as go_on:
            job = spawn(lambda: begun.append("left"), Waiter(departure))
            theirs.close()
            with gevent.Timeout(60), pytest.raises(ClientLeft):
                job.get()
            go_on.set()
            with gevent.Timeout(60):
                run(lambda: begun.append("stays"), KIND, Waiter())
    assert begun == ["stays"]


def test_work_that_nobody_wants_any_more_does_not_begin_on_its_thread() -> None:
    begun: list[str] = []
    job = _Job(lambda: begun.append("late"))
    with job.wanted():
        pass
    job.run()
    assert begun == []


def test_request_whose_client_leaves_while_its_grammar_waits_ends() -> None:
    body = json.dumps({"prompt": "a", "regex": "a{3}"}).encode()
    with (
        gevent.Timeout(250),
        running(StubService()) as service,
        serving_of(service) as server,
        busy(),
    ):
        with Client(server) as client:
            client.send(post(body, path=b"/generate"))
            until(lambda: service.drain.num_open)
        until(lambda: not service.drain.num_open)  # the threads are busy still


def test_more_than_the_bound_is_refused_and_taken_when_there_is_room() -> None:
    with busy() as go_on:
        jobs = [spawn(lambda: "done", Waiter()) for _ in range(MAX_WAITING)]
        with pytest.raises(Overloaded, match="wait for its grammar threads") as caught:
            run(lambda: "refused", KIND, Waiter())
        assert (caught.value.position, caught.value.length) == (MAX_WAITING + 1, MAX_WAITING)
        assert int(caught.value.headers()["Retry-After"]) >= 1
        assert run(lambda: "other", "text", Waiter()) == "other"
        go_on.set()
        assert {job.get(timeout=60) for job in jobs} == {"done"}
    assert run(lambda: "done", KIND, Waiter()) == "done"


def test_one_key_leaves_half_of_the_places_to_others() -> None:
    with busy() as go_on:
        num = MAX_WAITING // 2 + NUM_THREADS[KIND]
        jobs = [spawn(lambda: "done", Waiter(owner="flood")) for _ in range(num)]
        with pytest.raises(Overloaded, match="of one API key 128"):
            run(lambda: "refused", KIND, Waiter(owner="flood"))
        jobs.append(spawn(lambda: "done", Waiter(owner="other")))
        go_on.set()
        assert {job.get(timeout=60) for job in jobs} == {"done"}


def test_wait_that_is_told_is_what_work_has_taken_of_late() -> None:
    def turn() -> None:
        threading.Event().wait(0.02)

    for _ in range(3):
        run(turn, KIND, Waiter())
    with busy() as go_on:
        jobs = [spawn(lambda: None, Waiter()) for _ in range(MAX_WAITING)]
        with pytest.raises(Overloaded) as caught:
            run(turn, KIND, Waiter())
        assert (caught.value.retry_after or 0.0) > 0
        go_on.set()
        gevent.joinall(jobs, timeout=60, raise_error=True)
