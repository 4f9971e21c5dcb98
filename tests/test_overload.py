"""More than the server can take (FR54): over real sockets, on the stub model."""

from __future__ import annotations

import json
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import gevent
import openai
import psutil
import pytest

from app import http
from app.edge import Edge
from app.keys import read_pairs
from app.sequence import StepPlan

from .services import SETTINGS, StubService, hold_until, running, still_clock, until
from .sockets import Client, Reply, post, serving_of

STEP_SECONDS = 0.005
NUM_ARRIVALS, NUM_QUEUED = 1000, 60

T = TypeVar("T")


class Gate:
    """The stub's `change`: steps wait until it is open."""

    def __init__(self) -> None:
        self.is_open = False

    def __call__(self, plan: StepPlan, logits: object) -> None:
        hold_until(lambda: self.is_open)


@contextmanager
def serving(num_rows: int, **bounds: Any) -> Iterator[tuple[StubService, Edge, Gate]]:
    """Its model waits for the gate."""
    service = StubService(replace(SETTINGS, **bounds), max_batch_size=num_rows)
    with gevent.Timeout(250), running(service), serving_of(service) as server:
        service.stub.plans.clear()
        service.stub.change = gate = Gate()
        try:
            yield service, server, gate
        finally:
            gate.is_open = True


def generate(request_id: str = "x", **body: Any) -> bytes:
    payload = json.dumps({"prompt": "a"} | body).encode()
    return post(payload, b"X-Request-Id: " + request_id.encode(), path=b"/generate")


def ask(server: Edge, request_id: str = "x", **body: Any) -> Reply:
    with Client(server) as client:
        return client.send(generate(request_id, **body)).read()


def fill(service: StubService, server: Edge, num_queued: int, **body: Any) -> list[Any]:
    """One request that runs, and others that wait behind it."""
    jobs = [gevent.spawn(ask, server, "running", max_tokens=2)]
    until(lambda: service.stub.plans)
    jobs += [gevent.spawn(ask, server, f"waits-{i}", **body) for i in range(num_queued)]
    until(lambda: service.bridge.backlog.num_sequences == num_queued)
    return jobs


def on_a_thread(work: Callable[[], T]) -> Any:
    """OpenAI's client would hold the hub."""
    return gevent.get_hub().threadpool.spawn(work)


def read_ids(service: StubService) -> set[str]:
    """Of the requests whose prompts the model has seen."""
    return {plan.prefill.sequence.request_id for plan in service.stub.plans if plan.prefill}


# --- the bounds -----------------------------------------------------------------------------------


def test_request_over_the_bound_is_a_429_that_says_what_it_would_have_waited_for() -> None:
    with serving(1, max_queued_requests=3) as (service, server, gate):
        jobs = fill(service, server, 3)
        reply = ask(server)
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["type"], error["code"]) == (
            *(429, "rate_limit_error", "overloaded"),
        )
        assert (error["queue_position"], error["queue_length"], error["param"]) == (4, 3, None)
        assert int(reply.headers["retry-after"]) >= max(1, error["estimated_wait_seconds"])
        value = service.registry.get_sample_value
        assert value("phi_serve_requests_rejected_total", {"reason": "overloaded"}) == 1
        assert value("phi_serve_queued_prompt_tokens") == 3
        gate.is_open = True
        assert [job.get().status for job in jobs] == [200] * 4
        until(service.is_idle)
        assert value("phi_serve_queued_prompt_tokens") == 0
        assert ask(server, max_tokens=1).status == 200


def test_refusal_takes_less_than_50_ms() -> None:
    with serving(1, max_queued_requests=50) as (service, server, _):
        fill(service, server, 50)
        num_refusals = 20
        started_at = time.thread_time()  # the hub's, and so the client's: others may be busy
        assert [ask(server).status for _ in range(num_refusals)] == [429] * num_refusals
        assert (time.thread_time() - started_at) / num_refusals < 0.05


@pytest.mark.parametrize("path", [b"/generate", b"/v1/completions", b"/v1/chat/completions"])
def test_full_queue_refuses_before_anything_is_tokenized(path: bytes) -> None:
    with serving(1, max_queued_requests=1) as (service, server, _):
        fill(service, server, 1)
        # Neither would pass the tokenizer: the model has no chat template, and the text is too
        # long.
        body = {"messages": [{"role": "user", "content": "a"}]} if b"chat" in path else {}
        body = body or {"prompt": "abc " * 1000}
        with Client(server) as client:
            reply = client.send(post(json.dumps(body).encode(), path=path)).read()
        assert (reply.status, reply.code) == (429, "overloaded")


def test_prompt_that_is_too_long_for_the_queue_is_a_429_and_a_short_one_is_taken() -> None:
    with serving(1, max_queued_tokens=20) as (service, server, gate):
        jobs = fill(service, server, 1)
        reply = ask(server, prompt="abcdefghij" * 3)
        assert (reply.status, reply.code) == (429, "overloaded")
        assert "MAX_QUEUED_TOKENS" in json.loads(reply.body)["error"]["message"]
        jobs.append(gevent.spawn(ask, server, prompt="abc"))
        until(lambda: service.bridge.backlog.num_sequences == 2)
        gate.is_open = True
        assert [job.get().status for job in jobs] == [200] * 3


def test_request_with_more_choices_than_may_wait_is_taken_when_nothing_waits() -> None:
    with serving(1, max_queued_requests=2) as (service, server, gate):
        jobs = fill(service, server, 1)
        assert ask(server, n=3).status == 429
        gate.is_open = True
        gevent.joinall(jobs)
        until(service.is_idle)
        assert ask(server, n=3, max_tokens=1).status == 200


def test_openai_client_raises_its_rate_limit_error_and_comes_back_when_it_was_told_to() -> None:
    with serving(1, max_queued_requests=1) as (service, server, gate):
        fill(service, server, 1)
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", max_retries=0
        )

        def create(max_retries: int) -> openai.types.Completion:
            patient = client.with_options(max_retries=max_retries)
            return patient.completions.create(model="stub", prompt="a", max_tokens=1)

        with pytest.raises(openai.RateLimitError) as caught:
            on_a_thread(lambda: create(0)).get()
        assert caught.value.code == "overloaded"
        body: Any = caught.value.body
        assert (body["queue_position"], body["queue_length"]) == (2, 1)
        seconds = int(caught.value.response.headers["Retry-After"])

        started_at = time.monotonic()
        job = on_a_thread(lambda: create(2))
        until(
            lambda: (
                service.registry.get_sample_value(
                    "phi_serve_requests_rejected_total", {"reason": "overloaded"}
                )
                == 2
            )
        )
        gate.is_open = True
        assert job.get().choices[0].finish_reason == "length"
        assert time.monotonic() - started_at >= seconds
        client.close()


# --- in the queue ---------------------------------------------------------------------------------


def test_stream_that_waits_is_told_its_place_until_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.01)
    told = re.compile(rb": queued, position (\d+) of (\d+), about (\d+) s\n\n")
    with serving(1) as (service, server, gate):
        fill(service, server, 2, max_tokens=2)
        with Client(server) as client:
            client.send(generate(max_tokens=2, stream=True, prompt="abcdefgh" * 3))
            received = b""
            while not (found := told.findall(received)):
                received += client.socket.recv(4096)
            assert found[0][:2] == (b"3", b"3")
            gate.is_open = True
            while b"usage" not in received:
                received += client.socket.recv(4096)
        assert b"data: " in received
        assert not told.search(received[received.index(b"data: ") :])


def test_requests_whose_time_is_over_in_the_queue_are_never_read_and_leave_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = still_clock(monkeypatch)
    with serving(1) as (service, server, gate):
        [running, *waiting] = fill(service, server, 200, timeout_ms=100)
        clock.now += 1
        replies = [job.get() for job in waiting]
        assert {(reply.status, reply.code) for reply in replies} == {(504, "deadline_exceeded")}
        gate.is_open = True
        assert running.get().status == 200
        until(service.is_idle)
        assert service.bridge.backlog.num_sequences == 0
        assert read_ids(service) == {"running"}


def test_priority_of_a_request_goes_before_its_arrival() -> None:
    with serving(1) as (service, server, gate):
        jobs = fill(service, server, 0)
        for number, (name, priority) in enumerate(
            (("waits-0", 0), ("waits-1", 0), ("urgent", -1)), 1
        ):
            jobs.append(gevent.spawn(ask, server, name, priority=priority, max_tokens=1))
            until(lambda number=number: service.bridge.backlog.num_sequences == number)  # type: ignore[misc]
        gate.is_open = True
        gevent.joinall(jobs)
        order = [plan.prefill.sequence.request_id for plan in service.stub.plans if plan.prefill]
        assert order[:2] == ["running", "urgent"]
        assert sorted(order[2:]) == ["waits-0", "waits-1"]  # they came at once


def test_key_that_floods_leaves_others_their_turn_and_their_room() -> None:
    keys = read_pairs("flood:0123456789abcdef,other:fedcba9876543210")
    with serving(1, max_queued_requests=8, api_keys=keys) as (service, server, gate):

        def ask_as(secret: bytes, request_id: str) -> int:
            head = (b"X-Request-Id: " + request_id.encode(), b"Authorization: Bearer " + secret)
            with Client(server) as client:
                body = b'{"prompt": "a", "max_tokens": 2, "priority": -1000}'
                return client.send(post(body, *head, path=b"/generate")).read().status

        jobs = [gevent.spawn(ask_as, b"0123456789abcdef", "flood-0")]
        until(lambda: service.stub.plans)
        jobs += [gevent.spawn(ask_as, b"0123456789abcdef", f"flood-{i}") for i in range(1, 9)]
        until(lambda: service.bridge.backlog.num_sequences == 4)
        jobs.append(gevent.spawn(ask_as, b"fedcba9876543210", "other"))
        until(lambda: service.bridge.backlog.num_sequences == 5)
        gate.is_open = True
        statuses = [job.get() for job in jobs]
        assert (statuses.count(429), statuses[-1]) == (4, 200)
        order = [plan.prefill.sequence.request_id for plan in service.stub.plans if plan.prefill]
        assert order.index("other") == 1


@pytest.mark.parametrize("priority", [-1001, 1001, 0.5, "high"])
def test_priority_out_of_range_is_a_400_with_the_limits(priority: object) -> None:
    with serving(1) as (_, server, _):
        reply = ask(server, priority=priority)
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["param"]) == (400, "priority")
        assert "-1000 to 1000" in error["message"]


# --- FR54 -----------------------------------------------------------------------------------------


class Storm:
    """Requests that come at once: what they are told, and how long those wait that are taken."""

    def __init__(
        self, service: StubService, server: Edge, num_arrivals: int, clock: SimpleNamespace
    ) -> None:
        """No step ends before all have come: how fast clients are does not matter."""
        self.replies: list[Reply] = []
        have_come = threading.Event()

        def take_time(plan: StepPlan, logits: object) -> None:
            hold_until(have_come.is_set)
            clock.now += STEP_SECONDS

        service.stub.change = take_time
        spawned = gevent.spawn(self._wait_for_all, service, num_arrivals)
        spawned.link_value(lambda _: have_come.set())
        jobs = [gevent.spawn(self._ask, server, str(i)) for i in range(num_arrivals)]
        gevent.joinall(jobs, raise_error=True)

    def _wait_for_all(self, service: StubService, num_arrivals: int) -> None:
        until(lambda: len(self.replies) + service.bridge.num_streams == num_arrivals)

    def _ask(self, server: Edge, request_id: str) -> None:
        self.replies.append(ask(server, request_id, max_tokens=12, ignore_eos=True))

    @property
    def statuses(self) -> set[int]:
        return {reply.status for reply in self.replies}

    @property
    def refused(self) -> list[dict[str, Any]]:
        bodies = [json.loads(reply.body) for reply in self.replies if reply.status == 429]
        return [body["error"] for body in bodies]

    @property
    def seconds_in_queue(self) -> list[float]:
        bodies = [json.loads(reply.body) for reply in self.replies if reply.status == 200]
        return [body["timings"]["queue_seconds"] for body in bodies]


def test_storm_of_a_thousand_is_told_an_honest_wait_and_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Capacity 4: the last request that was taken waits as long as those that were not were told,
    within a factor of two; and a second storm takes no more memory. Time passes in steps alone."""
    clock = still_clock(monkeypatch)
    with serving(4, max_queued_requests=NUM_QUEUED) as (service, server, _):
        engine: Any = service.bridge._engine
        engine._clock = engine.backlog._clock = clock.monotonic
        warm = Storm(service, server, 12, clock)
        assert warm.statuses == {200}
        started_at = time.thread_time()
        first = Storm(service, server, NUM_ARRIVALS, clock)
        assert (time.thread_time() - started_at) / len(first.refused) < 0.05  # likewise
        memory = psutil.Process().memory_info().rss
        second = Storm(service, server, 2 * NUM_QUEUED, clock)
        grown = psutil.Process().memory_info().rss - memory
        for storm in (first, second):
            assert storm.statuses == {200, 429}
            assert len(storm.seconds_in_queue) >= NUM_QUEUED
            told = statistics.median(e["estimated_wait_seconds"] for e in storm.refused)
            true = max(storm.seconds_in_queue)
            assert true / 2 < told < true * 2
        assert grown < 20 << 20
