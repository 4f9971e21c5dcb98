"""Tracing: what a real receiver of OTLP gets of requests of all kinds, and what happens without."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from app.traced import Traced
from app.tracing import Seldom, Tracing

from .collector import Collector
from .live import ROOT, LiveServer, wait_for
from .stub_server import TOGETHER
from .test_drain import StubServer, stub_server
from .test_ops_port import free_port

UNSET, ERROR = 0, 2
SERVER = 2
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "Zanzibar"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traced")


@pytest.fixture(scope="module")
def server(folder: Path, collector: Collector) -> Iterator[StubServer]:
    """While two run, the model waits."""
    environment = {
        "OTLP_TRACES_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "20",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        "SERVED_MODEL_NAME": "stub,alias",
    }
    with stub_server(folder / "model", 2, **environment) as server:
        server.wait_ready()
        yield server


def post(
    server: LiveServer, request_id: str, path: str = "/generate", parent: str = "", **body: Any
) -> requests.Response:
    headers = {"X-Request-Id": request_id} | ({"traceparent": parent} if parent else {})
    payload = {"ignore_eos": True, "prompt": SECRET, "max_tokens": 5} | body
    return requests.post(server.url + path, json=payload, headers=headers, timeout=60)


def log_line(server: LiveServer, request_id: str) -> dict[str, Any]:
    """The access log's of that request."""

    def find() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in server.log.splitlines(keepends=True) if line[-1:]]
        return [line for line in lines if line.get("request_id") == request_id]

    [line] = wait_for(find, f"the line of {request_id}")
    assert isinstance(line, dict)
    return line


@pytest.mark.parametrize("is_stream", [False, True])
def test_answer_has_a_span_with_its_tokens_and_phases(
    server: StubServer, collector: Collector, is_stream: bool
) -> None:
    id_ = f"answered-{is_stream}"
    path = "/v1/completions"
    assert post(server, id_, path, model="alias", stream=is_stream, temperature=0).ok
    span = collector.span(id_)
    assert (span.name, span.kind, span.status) == (f"POST {path}", SERVER, UNSET)
    first_token = span.attributes.pop("gen_ai.response.time_to_first_chunk", None)
    cached = span.attributes.pop("gen_ai.usage.cache_read.input_tokens")
    assert 0 <= cached < len(SECRET)  # an earlier request may have left the prompt there
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": path,
        "url.path": path,
        "url.scheme": "http",
        "http.response.status_code": 200,
        "client.address": "127.0.0.1",
        "phi_serve.request_id": id_,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "phi_serve",
        "gen_ai.request.model": "alias",
        "gen_ai.request.stream": is_stream,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.response.model": "stub",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": 5,
    }
    assert [name for name, _, _ in span.events] == ["queue", "prefill", "decode"]
    instants = [at for _, at, _ in span.events]
    assert [span.began_at, *instants, span.ended_at] == sorted(
        [span.began_at, *instants, span.ended_at]
    )
    seconds = [attributes["seconds"] for _, _, attributes in span.events]
    assert seconds[1] == pytest.approx((instants[2] - instants[1]) / 1e9, abs=1e-5)
    assert seconds[2] > 0  # four steps
    if is_stream:
        assert first_token == pytest.approx(seconds[0] + seconds[1], abs=1e-5)


def test_choices_of_a_request_share_one_span(server: StubServer, collector: Collector) -> None:
    # Never both at once: the second choice waits for its prompt while the first one runs out.
    assert post(server, "choices", n=2, max_tokens=1).ok
    attributes = collector.span("choices").attributes
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "stub"


def test_parent_of_the_header_is_the_spans_and_the_logs(
    server: StubServer, collector: Collector
) -> None:
    post(server, "child", parent=f"00-{TRACE}-{PARENT}-01")
    span = collector.span("child")
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)
    assert log_line(server, "child")["trace_id"] == TRACE


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
def test_without_a_valid_parent_the_trace_begins_here(
    server: StubServer, collector: Collector, parent: str
) -> None:
    id_ = f"root-{parent[:5]}"
    assert post(server, id_, parent=parent).ok
    span = collector.span(id_)
    assert span.parent_id == ""
    assert log_line(server, id_)["trace_id"] == span.trace_id


def test_two_parents_are_none(server: StubServer, collector: Collector) -> None:
    address = urlsplit(server.url)
    line = f"traceparent: 00-{TRACE}-{PARENT}-01\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=30) as raw:
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Request-Id: two\r\nContent-Length: 0\r\n"
        raw.sendall(f"{head}{line}{line}\r\n".encode())
        assert raw.recv(12) == b"HTTP/1.1 415"
    assert collector.span("two").parent_id == ""


def test_trace_that_its_caller_does_not_sample_has_no_span_but_its_id_in_the_log(
    server: StubServer, collector: Collector
) -> None:
    assert post(server, "unsampled", parent=f"00-{TRACE}-{PARENT}-00").ok
    assert post(server, "behind").ok
    collector.span("behind")
    assert log_line(server, "unsampled")["trace_id"] == TRACE
    assert "unsampled" not in [span.attributes["phi_serve.request_id"] for span in collector.spans]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"max_tokens": -1}, 400, "invalid_value"),
        ({"model": "other"}, 404, "model_not_found"),
        ({"prompt": "a" * 500}, 400, "context_length_exceeded"),
    ],
)
def test_refused_request_has_a_span_that_names_its_error(
    server: StubServer, collector: Collector, body: dict[str, Any], status: int, code: str
) -> None:
    id_ = f"refused-{code}"
    assert post(server, id_, "/v1/completions", **body).status_code == status
    span = collector.span(id_)
    assert span.attributes["http.response.status_code"] == status
    assert (span.attributes["error.type"], span.status, span.events) == (code, UNSET, [])


def test_request_that_is_refused_before_the_app_has_a_span(
    server: StubServer, collector: Collector
) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as raw:
        raw.sendall(b"POST /no/such HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n")
        reply = raw.recv(65536).decode()
    span = collector.span(reply.split("X-Request-Id: ")[1].split("\r\n")[0])
    assert (span.name, span.attributes["url.path"]) == ("POST", "/no/such")
    assert span.attributes["error.type"] == "malformed_request"
    assert "http.route" not in span.attributes


def test_request_whose_time_is_over_has_a_span_with_an_error(
    server: StubServer, collector: Collector
) -> None:
    """A step takes five milliseconds."""
    response = post(server, "late", timeout_ms=1)
    assert response.status_code == 504
    span = collector.span("late")
    assert span.status == ERROR
    assert span.attributes["error.type"] == response.json()["error"]["code"]
    assert "decode" not in [name for name, _, _ in span.events]


def test_clients_that_leave_have_spans_with_an_error(
    server: StubServer, collector: Collector, folder: Path
) -> None:
    # Neither is done before the other has come, however late.
    body = {"prompt": "a", "ignore_eos": True, "stream": True, "max_tokens": 100}
    body |= {"priority": TOGETHER}
    try:
        bodies = [
            requests.post(
                f"{server.url}/generate",
                json=body,
                headers={"X-Request-Id": id_},
                stream=True,
                timeout=60,
            )
            for id_ in ("left-0", "left-1")
        ]
        for response in bodies:
            next(response.iter_lines())
            response.close()
        spans = [collector.span(f"left-{i}") for i in range(2)]
    finally:
        (folder / "model" / "gate").touch()
    for i, span in enumerate(spans):
        assert (span.status, span.attributes["error.type"]) == (ERROR, "client_left")
        assert span.attributes["http.response.status_code"] == 499
        assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"]
        assert 0 < span.attributes["gen_ai.usage.output_tokens"] < 100
        assert [name for name, _, _ in span.events] == ["queue", "prefill", "decode"]
        assert log_line(server, f"left-{i}")["trace_id"] == span.trace_id


def test_requests_without_work_have_no_span(server: StubServer, collector: Collector) -> None:
    requests.get(f"{server.url}/info", headers={"X-Request-Id": "look"}, timeout=60)
    assert post(server, "after-look").ok
    collector.span("after-look")
    assert "trace_id" not in log_line(server, "look")
    assert all(span.name.startswith("POST") for span in collector.spans)


def test_spans_tell_whose_they_are_and_nothing_that_was_written(
    server: StubServer, collector: Collector
) -> None:
    response = post(server, "quiet", "/v1/completions", stop=["Timbuktu"], user="Marrakesh")
    assert response.status_code in (200, 400)
    resource = collector.span("quiet").resource
    assert resource["service.name"] == "phi-serve"
    assert resource["deployment.environment.name"] == "test"
    sent = b"".join(collector.bodies)
    assert not any(word.encode() in sent for word in (SECRET, "Timbuktu", "Marrakesh"))


# --- the collector is away, or the server ends ----------------------------------------------------


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """A collector that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1/traces"


@pytest.fixture(scope="module")
def ending(folder: Path, collector: Collector, silent: str) -> Iterator[dict[str, StubServer]]:
    """Each for one test. They start together: it is their imports that take the time."""
    patient = {"OTEL_EXPORTER_OTLP_TIMEOUT": "3600", "OTEL_BSP_SCHEDULE_DELAY": "20"}
    small = {"OTEL_BSP_MAX_QUEUE_SIZE": "4", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4"}
    environments = {
        "silent": {"OTLP_TRACES_ENDPOINT": silent} | patient | small,
        "slow": {
            "OTLP_TRACES_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "3600000",
            "OTEL_SERVICE_NAME": "mine",
        },
    }
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(stub_server(folder / name, 4, **environment))
            for name, environment in environments.items()
        }


def test_collector_that_hangs_costs_spans_but_neither_requests_nor_the_end(
    ending: dict[str, StubServer],
) -> None:
    server = ending["silent"].wait_ready()
    assert all(post(server, f"lost-{i}").ok for i in range(12))
    wait_for(lambda: "Queue full, dropping Span." in server.log, "word of lost spans")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0  # an export may take an hour
    server._reader.join()
    assert "spans are lost" in server.log
    assert json.loads(server.log.splitlines()[-1])["message"].startswith("ended with status 0")


def test_spans_that_wait_are_sent_at_the_end(
    ending: dict[str, StubServer], collector: Collector
) -> None:
    server = ending["slow"].wait_ready()
    assert post(server, "last").ok
    assert "last" not in [span.attributes["phi_serve.request_id"] for span in collector.spans]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert collector.span("last").resource["service.name"] == "mine"


def test_collector_that_is_away_is_told_and_not_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setattr("app.tracing.FLUSH_SECONDS", 0.2)
    tracing = Tracing(f"http://127.0.0.1:{free_port()}/v1/traces")
    line = {"request_id": "x", "method": "POST", "path": "/generate", "status": 200}
    line |= {"num_bytes": 1, "seconds": 0.1, "client": None, "note": {}}
    assert tracing.tell(line, [], Traced())
    wait_for(lambda: "Connection refused" in caplog.text, "an attempt")  # others follow
    tracing.close()
    assert "spans are lost" in caplog.text
    # It ends now, and tells no other test's log of it.
    own = ("OtelBatch", "tracing-end")
    wait_for(lambda: not any(t.name.startswith(own) for t in threading.enumerate()), "an end")


def test_span_that_cannot_be_made_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    tracing = Tracing(f"http://127.0.0.1:{free_port()}/v1/traces")
    assert tracing.tell({"request_id": "mine", "path": None}, [], Traced()) is None
    assert "request mine has no span" in caplog.text
    tracing.close()


def test_same_message_is_told_once_a_minute() -> None:
    clock = SimpleNamespace(now=0.0)
    seldom = Seldom(lambda: clock.now)

    def record(message: str, *values: object) -> logging.LogRecord:
        return logging.LogRecord("x", logging.ERROR, "", 0, message, values, None)

    assert [seldom.filter(record("failed %s", i)) for i in range(3)] == [True, False, False]
    assert seldom.filter(record("other"))
    clock.now = 61.0
    assert seldom.filter(record("failed %s", 9))


# --- off, or wrong --------------------------------------------------------------------------------


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    done = python(
        "import sys, app.__main__, app.api, app.edge, app.service\n"
        f"settings = app.config.read_settings(['--model', {str(tmp_path)!r}, '--port', '0'])\n"
        "service = app.service.Service(settings)\n"
        "app.edge.bind(app.api.create_app(service), settings, print, service.tracing)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert done.stdout == "[]\n", done.stderr


def test_missing_packages_end_the_start_with_the_name_of_the_requirements() -> None:
    done = python(
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from app.config import read_settings\n"
        "read_settings(['--otlp-traces-endpoint', 'http://collector:4318/v1/traces'])"
    )
    assert done.returncode == 2
    assert "OTLP_TRACES_ENDPOINT" in done.stderr
    assert "requirements-tracing.txt" in " ".join(done.stderr.split())
