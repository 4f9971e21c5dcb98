"""What the collector of cycles has to do beside answers: seldom and little."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from app.answer import Answer
from app.bridge import TokenStream
from app.connection import Connection
from app.sequence import Sequence

from .services import StubService, running, until
from .sockets import GET, Client, post, serving_of

NUM_REQUESTS = 5
BODIES = {
    "plain": b'{"prompt": "a", "max_tokens": 3}',
    "stream": b'{"prompt": "a", "max_tokens": 3, "stream": true}',
    "deadline": b'{"prompt": "a", "max_tokens": 3, "stream": true, "timeout_ms": 30000}',
    "refused": b'{"prompt": 1}',
}


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live() -> list[Any]:
    kinds = (Answer, Connection, Sequence, TokenStream)
    return [each for each in gc.get_objects() if isinstance(each, kinds)]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_answers_and_connections_need_no_collection(uncollected: None, body: bytes) -> None:
    with running(StubService()) as service, serving_of(service) as server:
        known = {id(each) for each in live()}
        for _ in range(NUM_REQUESTS):
            with Client(server) as client:
                client.send(post(body, b"Connection: close", path=b"/generate")).read_to_end()
            with Client(server) as client:  # one that ends while it is idle
                client.send(GET).read()
        until(lambda: not server.open)
        service.stub.plans.clear()
        until(lambda: not [each for each in live() if id(each) not in known])


def test_collections_are_rare_and_leave_out_what_was_loaded() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)  # Python's own
        with running(StubService()):
            assert gc.get_threshold()[0] >= 10_000
            assert gc.get_freeze_count() > 0
    finally:
        gc.set_threshold(*before)
