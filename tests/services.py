"""The whole service on a stub engine, in process, and what reads its answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import gevent
import pytest
from flask.testing import FlaskClient

from app.cache_options import CACHE_OPTIONS
from app.config import Settings
from app.device_options import DEVICE_OPTIONS
from app.edge_options import EDGE_OPTIONS
from app.engine import Engine
from app.metrics_options import METRICS_OPTIONS
from app.queue_options import QUEUE_OPTIONS
from app.served import Served
from app.service import Service
from app.text import TextCodec
from app.tracing_options import TRACING_OPTIONS

from .engines import STUB_VOCAB, StubModel, loaded_model, stub_engine
from .tiny_tokenizers import byte_level_tokenizer

EDGE: dict[str, Any] = {
    str(option.name): option.default
    for option in [
        *(*EDGE_OPTIONS, *QUEUE_OPTIONS, *METRICS_OPTIONS, *CACHE_OPTIONS, *DEVICE_OPTIONS),
        *TRACING_OPTIONS,
    ]
}
SETTINGS = Settings(
    *(
        Path(),
        "127.0.0.1",
        0,
        "cpu",
        False,
        False,
        1,
        4,
        64,
        8,
        0.0,
        100_000,
        0,
        60,
        50,
        0,
        0,
        30,
        (),
        "info",
    ),
    admin_api_key="",
    **EDGE,
    api_keys=(),
    api_keys_file=None,
    cors_origins=(),
)
CONTEXT = 64
GIVE_UP_SECONDS = 60  # what comes at once where nothing is wrong; a busy machine may take long
CODEC = TextCodec(byte_level_tokenizer(), frozenset())

S = TypeVar("S", bound=Service)


class StubService(Service):
    """The real service, with a stub engine where it would load a folder."""

    stub: StubModel

    def __init__(self, settings: Settings = SETTINGS, **shape: Any) -> None:
        """`shape` is `stub_engine`'s."""
        super().__init__(settings)
        self._shape = shape

    def _load(self, served: Served) -> Engine:
        shape = {"max_model_len": CONTEXT} | self._shape
        engine, self.stub = stub_engine(observer=served.observer, **shape)
        served.loaded = loaded_model("stub", CODEC, shape["max_model_len"], STUB_VOCAB)
        return engine

    def is_idle(self) -> bool:
        """By its own account: nothing waits, nothing runs."""
        value = self.registry.get_sample_value
        return not (
            value("phi_serve_num_requests_running") or value("phi_serve_num_requests_waiting")
        )


@contextmanager
def running(service: S) -> Iterator[S]:
    """Ready inside, ended behind."""
    service.bridge.start()
    until(lambda: service.bridge.is_ready)
    try:
        yield service
    finally:
        service.bridge.request_stop()
        assert service.bridge.ended.wait(GIVE_UP_SECONDS)


def until(condition: Callable[[], object]) -> None:
    """On the hub, which turns meanwhile."""
    with gevent.Timeout(GIVE_UP_SECONDS):
        while not condition():
            gevent.sleep(0.001)


def hold_until(condition: Callable[[], object]) -> None:
    """Likewise, on the engine thread: where it raises, the step fails, and so do its requests."""
    give_up_at = time.monotonic() + GIVE_UP_SECONDS
    while not condition():
        assert time.monotonic() < give_up_at, "waited in vain"
        time.sleep(0.001)


def still_clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The hub's time of requests, which passes with `clock.now` alone: a deadline whose real time
    has come is looked at, and put off until then."""
    clock = SimpleNamespace(now=time.monotonic())
    clock.monotonic = lambda: clock.now
    for module in ("app.http", "app.answer"):
        monkeypatch.setattr(f"{module}.time", clock)
    return clock


def events(body: bytes) -> list[dict[str, Any]]:
    lines = body.splitlines()
    return [json.loads(line[6:]) for line in lines if line and not line.startswith(b":")]


def read_slowly(
    client: FlaskClient,
    first_is_read: threading.Event,
    path: str = "/generate",
    headers: dict[str, str] | None = None,
    **body: Any,
) -> bytes:
    """A stream's body; sets `first_is_read` once its first event is there."""
    payload = {"stream": True, **body}
    response = client.post(path, json=payload, headers=headers, buffered=False)
    assert response.status_code == 200
    parts = iter(response.response)
    first = next(parts)
    assert isinstance(first, bytes)
    first_is_read.set()
    return first + b"".join(part for part in parts if isinstance(part, bytes))
