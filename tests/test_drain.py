"""The way out (FR53): what a signal does to requests that run, wait, come late or never end."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gevent
import gevent.event
import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from app.api import create_app
from app.drain import Drain
from app.sequence import StepPlan

from .live import LiveServer, wait_for
from .services import StubService, events, hold_until, read_slowly, running, until

# --- in process -----------------------------------------------------------------------------------


class Sleep:
    """A sleep that ends when the test says so."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.is_over = gevent.event.Event()

    def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        self.is_over.wait(60)


@pytest.fixture
def sleep() -> Sleep:
    return Sleep()


@pytest.fixture
def service(sleep: Sleep) -> Iterator[StubService]:
    service = StubService()
    service.drain = Drain(service.bridge, 7, 0, sleep)
    with running(service):
        yield service
        sleep.is_over.set()


@pytest.fixture
def client(service: StubService) -> FlaskClient:
    return create_app(service).test_client()


def post(client: FlaskClient, path: str = "/generate", **body: Any) -> TestResponse:
    """Read to its end and closed, as a server does it."""
    return client.post(path, json=body, buffered=True)


def ready(client: FlaskClient) -> tuple[int, str]:
    response = client.get("/health/ready")
    body = response.get_json()
    return response.status_code, body["error"]["code"] if "error" in body else body["status"]


def test_signal_ends_readiness_at_once_and_requests_are_served_for_the_pre_drain_time(
    service: StubService, client: FlaskClient, sleep: Sleep
) -> None:
    service.drain.hear()
    assert ready(client) == (503, "draining")
    until(lambda: sleep.asked)
    response = post(client, prompt="a", max_tokens=3)
    assert response.get_json()["usage"]["completion_tokens"] == 3
    assert response.headers["Connection"] == "close"
    assert sleep.asked == [7]
    sleep.is_over.set()
    until(service.bridge.ended.is_set)


def test_connections_are_kept_until_a_signal_comes(client: FlaskClient) -> None:
    assert "Connection" not in client.get("/health/live").headers


def test_request_behind_the_pre_drain_time_is_refused_while_others_end(
    service: StubService, client: FlaskClient, sleep: Sleep
) -> None:
    service.drain = drain = Drain(service.bridge, 0, 20, sleep)
    client = create_app(service).test_client()
    go_on = threading.Event()
    service.stub.change = lambda plan, logits: hold_until(go_on.is_set)
    jobs = [
        gevent.spawn(post, client, prompt="a", max_tokens=3, stream=stream)
        for stream in (True, False)
    ]
    until(lambda: len(service.stub.plans) > 1)  # the first is that of the self-test
    sleep.is_over.set()
    drain.hear()
    until(lambda: drain.is_closed)
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"):
        refused = post(client, path, prompt="a")
        assert (refused.status_code, refused.get_json()["error"]["code"]) == (503, "draining")
        assert refused.headers["Connection"] == "close"
    assert client.get("/health/live").status_code == 200
    assert not service.bridge.ended.is_set()
    go_on.set()
    streamed, plain = (job.get(timeout=60) for job in jobs)
    assert plain.get_json()["usage"]["completion_tokens"] == 3
    assert events(streamed.data)[-1]["finish_reason"] == "length"
    until(service.bridge.ended.is_set)
    assert (drain.num_finished, drain.num_cut_short, drain.num_refused) == (2, 0, 4)


@pytest.mark.parametrize("num_signals", [1, 2])
def test_requests_that_are_not_done_end_with_a_typed_error(
    service: StubService, client: FlaskClient, sleep: Sleep, num_signals: int
) -> None:
    """After the pre-drain time and no more, or at the second signal. In queue, prefill and
    mid-stream, while a step of the model hangs."""
    first_is_read, go_on = threading.Event(), threading.Event()
    bodies: list[bytes] = []

    def change(plan: StepPlan, logits: Any) -> None:
        if plan.decode:
            hold_until(go_on.is_set)

    service.stub.change = change
    reader = gevent.spawn(
        lambda: bodies.append(read_slowly(client, first_is_read, prompt="a", max_tokens=50))
    )
    until(first_is_read.is_set)
    jobs = [
        gevent.spawn(post, client, prompt="b", max_tokens=50, stream=stream)
        for stream in (True, False)
    ]
    until(lambda: service.drain.num_open == 3)
    for _ in range(num_signals):
        service.drain.hear()
    if num_signals == 1:
        sleep.is_over.set()
    reader.get(timeout=60)
    *_, last = events(bodies[0])
    assert (last["error"]["code"], last["error"]["type"]) == (
        "draining",
        "service_unavailable_error",
    )
    for job in jobs:  # they have no token yet
        response = job.get(timeout=60)
        assert response.status_code == 503
        assert response.get_json()["error"]["code"] == "draining"
    go_on.set()
    until(service.bridge.ended.is_set)
    assert (service.drain.num_finished, service.drain.num_cut_short) == (0, 3)


def test_request_that_the_stop_overtakes_is_told_of_it(
    service: StubService, client: FlaskClient
) -> None:
    """It was let in, and would still have been read when the server stopped."""
    service.bridge.request_stop()
    assert not service.drain.is_closed
    for path in ("/generate", "/tokenize"):
        refused = post(client, path, prompt="a")
        assert (refused.status_code, refused.get_json()["error"]["code"]) == (503, "draining")


def test_signal_while_loading_ends_at_once() -> None:
    service = StubService()
    service.drain.hear()
    assert service.bridge.ended.is_set()


def test_requests_are_counted_to_their_last_byte_however_they_end(service: StubService) -> None:
    client = create_app(service).test_client()
    drain = service.drain
    for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": 1}):
        post(client, **body)
    post(client, "/nowhere")
    assert drain.num_open == 0
    response = client.post("/generate", json={"prompt": "a", "stream": True}, buffered=False)
    assert drain.num_open == 1
    response.close()
    assert drain.num_open == 0


def test_request_that_breaks_is_not_counted_any_more(service: StubService) -> None:
    drain = service.drain
    seen: list[int] = []

    def broken(environ: dict[str, Any], start_response: Any) -> Any:
        seen.append(drain.num_open)
        raise SystemExit

    with pytest.raises(SystemExit):
        drain.counting(broken)({"REQUEST_METHOD": "POST"}, None)
    assert (seen, drain.num_open) == ([1], 0)


def test_answer_whose_end_breaks_is_not_counted_any_more(service: StubService) -> None:
    class Broken(list[bytes]):
        def close(self) -> None:
            raise RuntimeError

    body = service.drain.counting(lambda *_: Broken())({"REQUEST_METHOD": "POST"}, None)
    assert service.drain.num_open == 1
    body.close()
    assert service.drain.num_open == 0


# --- as a process ---------------------------------------------------------------------------------

NUM_ROWS, NUM_QUEUED = 32, 4
MAX_LEN = 160


class StubServer(LiveServer):
    module = "tests.stub_server"


def stub_server(folder: Path, num_rows: int, port: int = 0, **environment: str) -> StubServer:
    """With as much of a model's folder as the settings ask for."""
    folder.mkdir()
    (folder / "model.onnx").touch()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": MAX_LEN}))
    arguments = ["--max-batch-size", str(num_rows), "--max-model-len", str(MAX_LEN)]
    arguments += ["--port", str(port)]
    return StubServer(folder, *arguments, **{"STEP_GATE": str(folder / "gate")} | environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[dict[str, StubServer]]:
    """Each for one test. They start together: it is their imports that take the time."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(stub_server(folder / name, num_rows, **environment))
            for name, num_rows, environment in (
                ("drain", NUM_ROWS, {}),
                ("hurry", 2, {"DRAIN_SECONDS": "3600"}),
            )
        }


def ask(server: LiveServer, **body: Any) -> socket.socket:
    address = urlsplit(server.url)
    payload = json.dumps({"prompt": "a", "ignore_eos": True} | body)
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n"
    raw = socket.create_connection((address.hostname, address.port), timeout=60)
    raw.sendall(f"{head}Content-Type: application/json\r\n\r\n{payload}".encode())
    return raw


def read(raw: socket.socket) -> bytes:
    """To the connection's end; a reset raises."""
    with raw:
        return b"".join(iter(lambda: raw.recv(65536), b""))


def fill(server: LiveServer, num_rows: int, num_tokens: int) -> list[socket.socket]:
    """Streams, all of them running, and the model waits."""
    body = {"stream": True, "max_tokens": num_tokens, "priority": -1000}  # stub_server.TOGETHER
    asked = [ask(server, **body) for _ in range(num_rows)]
    wait_for(lambda: server.metric("num_requests_running") == num_rows, "a full batch")
    return asked


def last_line(server: LiveServer) -> dict[str, Any]:
    """Of the log of a server that has ended."""
    server._reader.join()
    line: dict[str, Any] = json.loads(server.log.splitlines()[-1])
    return line


def test_sigterm_under_32_streams_completes_them_and_those_in_the_queue(
    servers: dict[str, StubServer], folder: Path
) -> None:
    server = servers["drain"].wait_ready()
    idle = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    idle.request("GET", "/health/live")
    idle.getresponse().read()
    asked = fill(server, NUM_ROWS, MAX_LEN - 10)
    asked += [ask(server, stream=bool(i % 2), max_tokens=5) for i in range(NUM_QUEUED)]
    # They have been read once a request behind them has its answer.
    server.get("/health/live")
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: server.get("/health/ready").status_code == 503, "the signal to be heard")
    late = server.post(prompt="a")
    assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
    assert late.headers["Connection"] == "close"
    assert server.process.poll() is None
    (folder / "drain" / "gate").touch()
    answers = [read(raw) for raw in asked]  # no reset
    assert server.process.wait(60) == 0
    idle.close()
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'"finish_reason":"length"' in answer
        assert b'"error"' not in answer
    last = last_line(server)
    assert last["message"] == (
        f"ended with status 0; requests since the signal: {NUM_ROWS + NUM_QUEUED} finished, "
        "0 cut short, 1 refused"
    )
    streamed = [answer for answer in answers if b"event-stream" in answer]
    assert len(streamed) == NUM_ROWS + NUM_QUEUED // 2
    assert all(answer.endswith(b"\r\n0\r\n\r\n") for answer in streamed)


def test_second_signal_ends_streams_with_an_error_and_the_process_with_0(
    servers: dict[str, StubServer],
) -> None:
    """Though the model hangs, and the time to drain is long."""
    server = servers["hurry"].wait_ready()
    asked = fill(server, 2, 100)
    server.process.send_signal(signal.SIGINT)
    wait_for(lambda: server.get("/health/ready").status_code == 503, "the signal to be heard")
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    answers = [read(raw) for raw in asked]
    assert server.process.wait(60) == 0
    assert all(b'"code":"draining"' in answer for answer in answers)
    assert "0 finished, 2 cut short, 0 refused" in last_line(server)["message"]


def test_signal_in_the_load_ends_the_process_without_waiting_for_it(tmp_path: Path) -> None:
    with stub_server(tmp_path / "model", 2, LOAD_GATE=str(tmp_path / "never")) as server:
        wait_for(lambda: "waiting for a file" in server.get("/health/ready").text, "the load")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_load_that_takes_too_long_ends_the_process_with_1_and_names_its_stage(
    tmp_path: Path,
) -> None:
    names = {"LOAD_GATE": str(tmp_path / "never"), "MAX_LOAD_SECONDS": "1"}
    with stub_server(tmp_path / "model", 2, **names) as server:
        assert server.process.wait(60) == 1
        server._reader.join()
        lines = [json.loads(line) for line in server.log.splitlines()]
        [line] = [line for line in lines if line["level"] == "CRITICAL"]
        assert line["message"].startswith(
            "cannot serve: the load is not done within 1 s (MAX_LOAD_SECONDS); it is at: waiting "
            "for a file for "
        )
        assert line["message"].endswith(f" (MODEL_PATH={tmp_path / 'model'})")
        assert "loading: waiting for a file" in [line["message"] for line in lines]
        assert lines[-1]["message"] == "ended with status 1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_heard_where_the_parent_ignores_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As a container's first process: the kernel drops what has no handler."""
    was = signal.signal(number, signal.SIG_IGN)  # a child inherits it
    try:
        server = stub_server(tmp_path / "model", 2, LOAD_GATE=str(tmp_path / "never"))
    finally:
        signal.signal(number, was)
    with server:
        server.process.send_signal(number)
        assert server.process.wait(60) == 0


def test_death_of_the_engine_thread_ends_the_process_with_1_and_a_message(tmp_path: Path) -> None:
    """How its requests end is in test_bridge."""
    gate = tmp_path / "gate"
    names = {"DEATH_GATE": str(gate), "SERVED_MODEL_NAME": "stub", "LOG_FORMAT": "text"}
    with stub_server(tmp_path / "model", 2, **names) as server:
        server.wait_ready()
        gate.touch()
        assert server.process.wait(60) == 1
        server._reader.join()
        assert "the engine thread has died" in server.log
        assert 'CRITICAL app cannot serve: SystemExit("a stub\'s death")\n' in server.log
        assert server.log.endswith(" INFO app ended with status 1\n")
