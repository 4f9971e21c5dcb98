"""The load client's event loop, against a small real server in this process."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import pytest
from dialects import PATHS, Target
from load_client import LoadClient, Run
from workload import Shape, make_conversations, run_closed, run_open

from .load_server import Body, FakeServer, RefusingServer, serving


def load(
    url: str, count: int = 4, clients: int = 2, retry: bool = False, timeout: float = 30, **how: Any
) -> Run:
    turns = how.pop("turns", 1)
    said = make_conversations(Random(0), [Shape(6, 3, turns=turns)], count)
    with LoadClient(url, retry, timeout) as client:
        return run_closed(client, Target(url, **how), clients, said)


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_every_api_is_asked_and_read(api: str, stream: bool) -> None:
    server = FakeServer()
    with serving(server) as url:
        run = load(url, api=api, stream=stream, model="tiny", extra={"top_k": 1})
    assert [a.failure for a in run] == [""] * 4
    assert {(a.prompt_tokens, a.completion_tokens, a.text) for a in run} == {
        (12, 3, "word word word " if stream else "")
    }
    assert all(len(a.text_at) == (3 if stream else 0) for a in run)
    assert all(a.sent_at < a.done_at for a in run)
    wanted = {"max_tokens": 3, "stream": stream, "ignore_eos": True, "temperature": 0, "top_k": 1}
    wanted |= {} if api == "generate" else {"model": "tiny"}
    assert all(body | wanted == body for body in server.bodies)
    assert server.num_connections == 2  # kept alive: one for each client
    assert 0 < run.cpu_share <= 1


@pytest.mark.parametrize("api", PATHS)
def test_each_turn_sends_what_was_said_before(api: str) -> None:
    server = FakeServer()
    with serving(server) as url:
        run = load(url, count=1, clients=1, turns=3, api=api)
    assert [a.turn for a in run] == [1, 2, 3]
    if api == "chat":
        histories = [body["messages"] for body in server.bodies]
        roles = [message["role"] for message in histories[2]]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
        assert histories[2][1]["content"] == run[0].text
    else:
        histories = [body["prompt"].split("\n") for body in server.bodies]
        assert histories[2][1] == run[0].text
    assert [len(history) for history in histories] == [1, 3, 5]
    assert histories[2][:3] == histories[1] and histories[1][:1] == histories[0]
    assert [a.prompt_tokens for a in run] == [12, 2 * (6 + 3 + 6), 2 * (6 + 3 + 6 + 3 + 6)]


class HeldServer(FakeServer):
    """Answers streams only when `num_wanted` of them have come."""

    def __init__(self, num_wanted: int) -> None:
        super().__init__()
        self.all_are_there = threading.Barrier(num_wanted, timeout=60)

    def answer(self, body: Body) -> tuple[int, list[Body]]:
        self.all_are_there.wait()
        return super().answer(body)


def test_open_loop_sends_as_planned_although_nothing_is_answered() -> None:
    instants = [0.0, 0.02, 0.03, 0.1, 0.11, 0.2]
    said = make_conversations(Random(0), [Shape(6, 3)], 6)
    with serving(HeldServer(6)) as url, LoadClient(url) as client:
        run = run_open(client, Target(url), instants, said)
    run.sort(key=lambda a: a.planned_at or 0)
    first = run[0].planned_at
    assert first is not None
    assert [a.planned_at and a.planned_at - first for a in run] == pytest.approx(instants)
    assert all(a.sent_at >= a.begun_at for a in run)
    # The barrier held the first until the last had come: its wait is in its latency.
    assert run[0].text_at[0] - run[0].begun_at > 0.2
    assert not any(a.failure for a in run)


def test_refusals_fail_or_are_sent_again_as_the_caller_says() -> None:
    with serving(RefusingServer()) as url:
        run = load(url)
    assert [(a.kind, a.num_429) for a in run] == [("http_429", 1)] * 4
    assert run[0].failure == 'HTTP 429: {"error": {"message": "come back later"}}'
    server = RefusingServer(num_refusals=3)
    server.headers["Retry-After"] = "0.01"
    with serving(server) as url:
        run = load(url, clients=1, retry=True)
    assert [(a.failure, a.num_429) for a in run] == [("", 3), ("", 0), ("", 0), ("", 0)]
    assert run[0].text_at[0] - run[0].begun_at > 0.03  # three waits


class ClosingServer(FakeServer):
    """Promises to keep its connections alive, and closes the second request's without a word."""

    def answer(self, body: Body) -> tuple[int, list[Body]]:
        if len(self.bodies) == 2:
            raise ConnectionError
        return super().answer(body)

    def handle_error(self, *_: object) -> None:
        pass


def test_kept_alive_connection_that_ends_under_a_request_is_no_failure() -> None:
    server = ClosingServer()
    with serving(server) as url:
        run = load(url, count=3, clients=1)
    assert [a.failure for a in run] == [""] * 3
    assert (len(server.bodies), server.num_connections) == (4, 2)


def test_new_connection_that_ends_without_an_answer_is_a_failure() -> None:
    server = ClosingServer()
    server.bodies.append({})
    with serving(server) as url:
        [first, *others] = load(url, count=3, clients=1)
    assert (first.kind, [a.failure for a in others]) == ("connection", ["", ""])


class BreakingServer(FakeServer):
    def answer(self, body: Body) -> tuple[int, list[Body]]:
        status, events = super().answer(body)
        return status, [*events[:-1], {"error": {"message": "boom"}}]


class HastyServer(FakeServer):
    def answer(self, body: Body) -> tuple[int, list[Body]]:
        return super().answer(body | {"max_tokens": 1})


class DumbServer(FakeServer):
    def answer(self, body: Body) -> tuple[int, list[Body]]:
        return 200, [{"nothing": "known"}]


class SilentServer(FakeServer):
    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def answer(self, body: Body) -> tuple[int, list[Body]]:
        assert self.may_answer.wait(60)
        return super().answer(body)


@pytest.mark.parametrize(
    ("server", "kind", "failure"),
    [
        (BreakingServer, "error_event", "error event: boom"),
        (HastyServer, "short_answer", "1 tokens instead of 3, finish_reason length"),
        (DumbServer, "bad_answer", "KeyError: 'text'"),
    ],
)
def test_failures_are_named_by_kind(server: type[FakeServer], kind: str, failure: str) -> None:
    with serving(server()) as url:
        run = load(url, turns=2)
    assert [(a.kind, a.failure) for a in run] == [(kind, failure)] * 4  # no second turn


def test_answers_may_end_early_where_that_is_allowed() -> None:
    with serving(HastyServer()) as url:
        assert [a.failure for a in load(url, may_end_early=True)] == [""] * 4


def test_silence_is_a_failure_after_its_time() -> None:
    server = SilentServer()
    with serving(server) as url:
        run = load(url, count=1, clients=1, timeout=0.05)
        server.may_answer.set()
    assert (run[0].kind, run[0].failure) == ("timeout", "nothing heard for 0.05 s")


def test_nobody_who_listens_is_a_failure_of_the_connection() -> None:
    server = FakeServer()
    server.server_close()
    run = load(f"http://127.0.0.1:{server.server_address[1]}", count=1, clients=1)
    assert run[0].kind == "connection" and "refused" in run[0].failure
