"""The access log: one line for each request, with what the route knows of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.access import Line
from app.edge import Edge
from app.sequence import StepPlan

from .live import ROOT
from .services import StubService, hold_until, running, until
from .sockets import GET, LAST_GET, Client, post, serving, serving_of

TIMINGS = {"queue_seconds", "prefill_seconds", "decode_seconds", "tokens_per_second"}
ASK = b'{"prompt": "abc", "max_tokens": 5, "ignore_eos": true'

Lines = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def server() -> Iterator[Edge]:
    with serving() as server:
        yield server


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """So many lines, once they are written: that is after the answer's last byte."""
    caplog.set_level("INFO", "app.access")

    def wait(count: int) -> list[dict[str, Any]]:
        until(lambda: len(caplog.records) >= count)
        assert len(caplog.records) == count
        return [dict(record.msg) for record in caplog.records]  # type: ignore[call-overload]

    return wait


def ask(path: bytes, ending: bytes, *headers: bytes) -> bytes:
    return post(ASK + ending, *headers, path=path)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [b"/generate", b"/v1/completions"])
def test_answer_has_one_line_with_its_tokens_and_timings(
    server: Edge, lines: Lines, path: bytes, stream: bool
) -> None:
    ending = b', "stream": true}' if stream else b"}"
    with Client(server) as client:
        received = client.send(
            ask(path, ending, b"X-Request-Id: mine", b"Connection: close")
        ).read_to_end()
    [line] = lines(1)
    timings = {name: line.pop(name) for name in TIMINGS}
    seconds = line.pop("seconds")
    assert line == {
        "request_id": "mine",
        "method": "POST",
        "path": path.decode(),
        "status": 200,
        "bytes": len(received),
        "client": "127.0.0.1",
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "completion_tokens": 5,
        "finish_reason": "length",
    }
    assert timings["tokens_per_second"] > 0
    assert seconds >= timings["queue_seconds"] + timings["prefill_seconds"]


def test_several_choices_have_one_line(server: Edge, lines: Lines) -> None:
    with Client(server) as client:
        client.send(ask(b"/generate", b', "n": 3}')).read()
    [line] = lines(1)
    assert (line["completion_tokens"], line["finish_reason"]) == (15, "length")


def test_pipelined_requests_have_a_line_each_with_the_id_of_their_answer(
    server: Edge, lines: Lines
) -> None:
    with Client(server) as client:
        client.send(GET + ask(b"/generate", b"}") + LAST_GET)
        ids = [client.read().headers["x-request-id"] for _ in range(3)]
    found = lines(3)
    assert [line["request_id"] for line in found] == ids
    assert ["prompt_tokens" in line for line in found] == [False, True, False]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (GET.replace(b"/health/live", b"/nope?key=secret"), ("GET", "/nope", 404, "not_found")),
        (post(b"{}"), ("POST", "/tokenize", 400, "invalid_value")),
        (GET.replace(b"Host: x", b"Host: x\r\nHost: y"), ("GET", "/health/live", 400, None)),
        (b"nonsense\r\n\r\n", (None, None, 400, "malformed_request")),
        (post(b"1" * 200_000), ("POST", "/tokenize", 413, "payload_too_large")),
    ],
)
def test_refused_request_has_one_line_with_its_error(
    server: Edge, lines: Lines, request_: bytes, expected: tuple[Any, ...]
) -> None:
    with Client(server) as client:
        reply = client.send(request_).read()
    [line] = lines(1)
    method, path, status, code = expected
    assert (line["method"], line["path"], line["status"]) == (method, path, status)
    assert line["error"] == (code or "malformed_request")
    assert (line["request_id"], reply.code) == (reply.headers["x-request-id"], line["error"])


@pytest.mark.parametrize("rows", [1, 3])
def test_client_that_leaves_in_mid_answer_is_a_499_with_its_tokens(
    lines: Lines, caplog: pytest.LogCaptureFixture, rows: int
) -> None:
    has_left = threading.Event()

    def change(plan: StepPlan, logits: object) -> None:
        num_tokens = len(plan.decode[0].output_ids) if plan.decode else 0
        if num_tokens == 3:
            hold_until(has_left.is_set)
        elif num_tokens == 10:
            hold_until(lambda: caplog.records)

    with running(StubService()) as service, serving_of(service) as server:
        service.stub.change = change
        with Client(server) as client:
            body = ASK.replace(b"5", b"50") + b', "stream": true, "n": %d}' % rows
            client.send(post(body, path=b"/generate")).read()
            client.reset()
        has_left.set()
        [line] = lines(1)
    assert (line["status"], line["prompt_tokens"]) == (499, 3)
    assert "abort" in line["finish_reason"]
    assert 0 < line["completion_tokens"] < 50 * rows


def test_stream_that_fails_in_mid_answer_has_its_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "app.access")
    has_begun = threading.Event()

    def fail(plan: StepPlan, logits: object) -> None:
        if plan.decode and len(plan.decode[0].output_ids) == 3:
            hold_until(has_begun.is_set)
            raise RuntimeError("no luck")

    with running(StubService()) as service, serving_of(service) as server:
        service.stub.change = fail
        with Client(server) as client:
            client.send(ask(b"/generate", b', "stream": true}', b"Connection: close"))
            client.read()
            has_begun.set()
            received = client.read_to_end()
        until(lambda: any(record.name == "app.access" for record in caplog.records))
    line = next(dict(r.msg) for r in caplog.records if r.name == "app.access")  # type: ignore[call-overload]
    assert b'"code":"model_failure"' in received
    assert (line["status"], line["error"], line["finish_reason"]) == (
        *(200, "model_failure"),
        "abort",
    )


def test_path_cannot_forge_a_line(server: Edge, lines: Lines) -> None:
    with Client(server) as client:
        client.send(GET.replace(b"/health/live", b"/%0aINFO%20forged%22" + b"a" * 1000)).read()
    [line] = lines(1)
    assert line["path"] == ("/%0aINFO%20forged%22" + "a" * 1000)[:512]
    assert "\n" not in str(Line(line))


SCRIPT = """
import logging, sys
from app.access import Line
from app.logs import set_up
set_up("info", sys.argv[1])
log = logging.getLogger("app.test")
log.debug("hidden")
log.info(Line({"path": '/"x"', "status": 200, "error": None}))
log.info(Line({"message": "loaded", "seconds": 2.5}))
log.warning("two\\nlines %s", "é")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def run_script(format_: str) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, format_]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stderr.splitlines()


def test_json_format_writes_an_object_a_line() -> None:
    found = [json.loads(line) for line in run_script("json")]
    for each in found:
        assert each.pop("time").endswith("+00:00")
        assert each.pop("logger") == "app.test"
    assert found[0] == {"level": "INFO", "path": '/"x"', "status": 200, "error": None}
    assert found[1] == {"level": "INFO", "message": "loaded", "seconds": 2.5}
    assert found[2] == {"level": "WARNING", "message": "two\nlines é"}
    assert "ZeroDivisionError" in found[3].pop("exc_info")
    assert found[3:] == [{"level": "ERROR", "message": "failed"}]


def test_text_format_writes_words() -> None:
    lines = run_script("text")
    assert lines[0].endswith(' INFO app.test path=/"x" status=200')
    assert lines[1].endswith(" INFO app.test loaded seconds=2.5")
    assert any("ZeroDivisionError" in line for line in lines)
