"""What turns readiness off is told, once, and what brings it back; the gauge says the same."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from app.api import create_app
from app.errors import NotReady
from app.pulse import Pulse
from app.readiness import Readiness

from .services import StubService, running

LIMIT_SECONDS = 5


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def service(clock: SimpleNamespace) -> Iterator[StubService]:
    service = StubService()
    service.bridge._thread.pulse = Pulse(LIMIT_SECONDS, lambda: clock.now)
    service.readiness = Readiness(service.check_ready, lambda: clock.now)
    with running(service):
        yield service


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", "app.readiness")
    return caplog


def lines(told: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Since the last time."""
    found = [
        (record.levelname, record.getMessage())
        for record in told.records
        if record.name == "app.readiness"
    ]
    told.clear()
    return found


def gauge(service: StubService) -> float | None:
    return service.registry.get_sample_value("phi_serve_ready")


def hang(service: StubService, clock: SimpleNamespace) -> None:
    service.bridge.pulse.beat()
    clock.now += LIMIT_SECONDS + 1


def test_hang_is_one_warning_and_its_end_one_line(
    service: StubService, clock: SimpleNamespace, told: pytest.LogCaptureFixture
) -> None:
    service.readiness.look()
    assert (lines(told), gauge(service)) == ([("INFO", "ready")], 1)
    hang(service, clock)
    assert gauge(service) == 0  # asked, not remembered
    for _ in range(3):
        service.readiness.look()
        clock.now += 4
    assert lines(told) == [("WARNING", "not ready any more: the model hangs: no progress for 6 s")]
    service.bridge.pulse.rest()
    for _ in range(2):
        service.readiness.look()
    assert (lines(told), gauge(service)) == ([("INFO", "ready, after 12 s")], 1)


def test_model_that_fails_is_told_with_that_reason(
    service: StubService, told: pytest.LogCaptureFixture
) -> None:
    def fail(plan: object, logits: object) -> None:
        raise RuntimeError

    service.readiness.look()
    service.stub.change = fail
    client = create_app(service).test_client()
    for _ in range(2):
        client.post("/generate", json={"prompt": "a"})
    service.readiness.look()
    assert lines(told)[1:] == [
        ("WARNING", "not ready any more: the last steps of the model have failed")
    ]


def test_loading_and_draining_are_not_told_as_losses(told: pytest.LogCaptureFixture) -> None:
    service = StubService()
    service.readiness.look()
    assert (lines(told), gauge(service)) == ([], 0)
    with running(service):
        service.readiness.look()
        assert lines(told) == [("INFO", "ready")]
        service.drain.announced.set()
        service.readiness.look()
        assert (lines(told), gauge(service)) == ([], 0)


def test_watch_outlives_a_look_that_fails(told: pytest.LogCaptureFixture) -> None:
    class Enough(BaseException):
        pass

    looks = iter([None, RuntimeError(), NotReady("hung"), Enough()])

    def check() -> None:
        if (error := next(looks)) is not None:
            raise error

    with pytest.raises(Enough):
        Readiness(check).keep(lambda seconds: None)
    assert lines(told) == [
        ("INFO", "ready"),
        ("ERROR", "readiness cannot be looked at"),
        ("WARNING", "not ready any more: hung"),
    ]
