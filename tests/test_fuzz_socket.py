"""scripts/fuzz_socket.py against the real server on a stub engine, and against wrong answers."""

from __future__ import annotations

import os
import random

import gevent
import pytest

from scripts.fuzz_socket import Tally, check, fuzz, hostile

from .services import StubService, running, until
from .sockets import GET, Client, serving_of


def test_hostile_requests_get_no_5xx_and_leave_nothing_behind() -> None:
    with running(StubService()) as service, serving_of(service) as server:
        threads = gevent.get_hub().threadpool
        url = f"http://127.0.0.1:{server.server_port}"
        num_files = len(os.listdir("/proc/self/fd"))
        tally: Tally = threads.apply(fuzz, (url, 600, 7))
        assert tally.failures == {}
        assert {"200", "400", "404", "413", "414", "415", "417", "431"} <= tally.statuses.keys()
        until(lambda: not server.open and service.is_idle())
        assert len(os.listdir("/proc/self/fd")) <= num_files + 1
        with Client(server) as client:
            assert client.send(GET).read().status == 200


@pytest.mark.parametrize(
    ("received", "failure"),
    [
        (b'HTTP/1.1 500 Oh\r\nContent-Length: 12\r\n\r\n{"error": 1}', "status 500"),
        (b"HTTP/1.1 400 Oh\r\nContent-Length: 2\r\n\r\nno", "status 400 without an error object"),
        (b"garbage", "not an HTTP answer"),
        (
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 ",
            "more behind Connection: close",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" * 9, "more answers than requests"),
    ],
)
def test_wrong_answers_are_found(received: bytes, failure: str) -> None:
    tally = Tally()
    check(GET, received, tally)
    assert failure in tally.failures


def test_seed_fixes_what_is_sent() -> None:
    first, second = ([hostile(random.Random(3)) for _ in range(5)] for _ in range(2))
    assert first == second
