"""schemathesis over the whole API, in process and on a tiny model: every answer as documented."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
import schemathesis
from flask import Flask

from app import generate_api, generate_replies
from app.api import create_app
from app.config import read_settings
from app.service import Service
from scripts.fuzz_api import fuzz

from .conftest import TinyModel


@pytest.fixture(scope="module")
def app(tiny_llama: TinyModel) -> Iterator[Flask]:
    arguments = ["--model", str(tiny_llama.folder), "--threads", "1", "--max-model-len", "128"]
    service = Service(read_settings(arguments))
    service.bridge.start()
    with gevent.Timeout(60):
        while not service.bridge.is_ready:
            gevent.sleep(0.001)
    yield create_app(service)
    service.bridge.request_stop()
    assert service.bridge.ended.wait(60)


def test_answers_to_generated_requests_are_as_documented(app: Flask) -> None:
    schema = schemathesis.openapi.from_wsgi("/openapi.json", app)
    tally = fuzz(schema, max_examples=6, seed=1)
    assert tally.failures == {}
    assert tally.num_requests >= 250
    off = [tally.statuses.pop(f"{method} /admin/model") for method in ("GET", "POST")]
    assert [counter.keys() - {400, 405, 413, 415} for counter in off] == [{403}, {403}]
    answered = {label: counter[200] for label, counter in tally.statuses.items()}
    assert min(answered.values()) > 0, answered


def adds_a_field(*_: Any) -> dict[str, Any]:
    return {"text": "", "surprise": 1}


def adds_an_event(*_: Any) -> Iterator[bytes]:
    yield b'data: {"text": 1}\n\n'


@pytest.mark.parametrize(
    ("name", "wrong", "title"),
    [
        ("result", adds_a_field, "Response violates schema"),
        ("events", adds_an_event, "SSE event payload violates content schema"),
    ],
)
def test_answer_that_is_not_as_documented_is_found(
    name: str,
    wrong: Callable[..., Any],
    title: str,
    app: Flask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate_replies, name, wrong)
    schema = schemathesis.openapi.from_wsgi("/openapi.json", app)
    tally = fuzz(schema.include(path=["/generate", "/v1/models"]), max_examples=8, seed=1)
    assert f"POST /generate: {title}" in tally.failures


def test_fault_of_the_server_is_found(app: Flask, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError

    monkeypatch.setattr(generate_api, "check_ids", fail)
    schema = schemathesis.openapi.from_wsgi("/openapi.json", app)
    tally = fuzz(schema.include(path=["/detokenize", "/v1/models"]), max_examples=3, seed=1)
    assert "POST /detokenize: status 500" in tally.failures
