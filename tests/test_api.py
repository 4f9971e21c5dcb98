"""Routes on a stub model, in process: what a client sees when the engine fails, and when."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient

from app.api import create_app
from app.config import Settings
from app.engine import Engine
from app.sequence import StepPlan
from app.service import LoadedModel, Service
from app.text import TextCodec

from .engines import StubModel, stub_engine
from .tiny_tokenizers import byte_level_tokenizer

SETTINGS = Settings(Path(), "127.0.0.1", 0, "cpu", 1, 4, 64, 8, 1000, "info")


class StubService(Service):
    """The real service, with a stub engine where it would load a folder."""

    stub: StubModel

    def _load(self) -> Engine:
        engine, self.stub = stub_engine()
        codec = TextCodec(byte_level_tokenizer(), frozenset())
        self._model = LoadedModel("stub", codec, 64, {"model": "stub"})
        return engine


@pytest.fixture
def service() -> Iterator[StubService]:
    service = StubService(SETTINGS)
    service.bridge.start()
    with gevent.Timeout(20):
        while not service.bridge.is_ready:
            gevent.sleep(0.001)
    yield service
    service.bridge.request_stop()
    assert service.bridge.ended.wait(20)


@pytest.fixture
def client(service: StubService) -> FlaskClient:
    return create_app(service).test_client()


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.splitlines() if line]


def failing_at(step: int) -> Callable[[StepPlan, object], None]:
    steps = iter(range(100))

    def fail(plan: StepPlan, logits: object) -> None:
        if next(steps) == step:
            raise RuntimeError("out of memory")

    return fail


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_is_a_real_500(
    service: StubService, client: FlaskClient, stream: bool
) -> None:
    service.stub.change = failing_at(0)
    response = client.post("/generate", json={"prompt": "a", "stream": stream})
    assert response.status_code == 500
    assert response.get_json()["error"]["code"] == "model_failure"
    assert "out of memory" not in response.text  # the type is told, the server's inside is not


@pytest.mark.parametrize("step", [3, 9])
def test_failure_in_mid_stream_is_one_error_event_at_the_end(
    service: StubService, client: FlaskClient, step: int
) -> None:
    service.stub.change = failing_at(step)
    response = client.post("/generate", json={"prompt": "a", "stream": True, "max_tokens": 20})
    assert response.status_code == 200
    *pieces, last = events(response.data)
    assert last["error"]["code"] == "model_failure"
    assert all("error" not in piece for piece in pieces)


def test_failure_in_mid_answer_of_a_plain_request_is_a_500(
    service: StubService, client: FlaskClient
) -> None:
    service.stub.change = failing_at(5)
    response = client.post("/generate", json={"prompt": "a", "max_tokens": 20})
    assert response.status_code == 500


def test_server_serves_on_after_a_failure(service: StubService, client: FlaskClient) -> None:
    service.stub.change = failing_at(0)
    client.post("/generate", json={"prompt": "a"})
    response = client.post("/generate", json={"prompt": "a", "max_tokens": 3})
    assert response.get_json()["usage"]["completion_tokens"] == 3


def test_a_bug_in_a_route_gets_a_500_without_a_trace(
    service: StubService, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(service, "submit", fail)
    response = client.post("/generate", json={"prompt": "a"})
    assert response.status_code == 500
    assert response.get_json()["error"]["type"] == "server_error"
    assert "secret" not in response.text


def test_readiness_ends_with_the_engine(service: StubService, client: FlaskClient) -> None:
    assert client.get("/health/ready").status_code == 200
    service.bridge.request_stop()
    assert client.get("/health/ready").status_code == 503
    assert client.get("/health/live").status_code == 200


def test_a_probe_is_not_counted_as_a_rejected_request(
    service: StubService, client: FlaskClient
) -> None:
    service.bridge.request_stop()
    client.get("/health/ready")
    client.post("/generate", json={"prompt": "a"})
    count = service.registry.get_sample_value(
        "phi_serve_requests_rejected_total", {"reason": "not_ready"}
    )
    assert count == 1
