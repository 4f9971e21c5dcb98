"""What Triton's metrics say of an engine, beside a stand-in for Triton's library."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine import Engine
from app.triton_backend import Backend

from .engines import greedy, stub_engine
from .live import wait_for


class Family:
    """Keeps what its metrics are set to in `told`, by the family's name."""

    GAUGE, COUNTER = "gauge", "counter"
    told: dict[str, float]

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name = name

    def Metric(self, labels: dict[str, str]) -> Family:  # noqa: N802 - Triton's
        return self

    def set(self, value: float) -> None:
        self.told[self._name] = value

    def increment(self, value: float) -> None:
        self.told[self._name] = self.told.get(self._name, 0) + value


class Mortal(Backend):
    """With a stub's engine, that dies in its first step behind `kill`."""

    def _load(self) -> Engine:
        self.stub = stub_engine()[0]
        return self.stub

    def kill(self) -> None:
        def die() -> Any:
            raise MemoryError("the engine is to die")

        self.stub.step = die  # type: ignore[method-assign]
        self._engine.submit(greedy("a", [1]))


def test_ready_is_0_once_the_engine_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.triton_backend.set_up", lambda *_: None)
    monkeypatch.setattr("app.triton_backend.limit_threads", lambda _: None)
    told: dict[str, float] = {}
    family = type("Told", (Family,), {"told": told})
    folder = tmp_path / "1" / "model"  # its settings are read, the rest is not
    folder.mkdir(parents=True)
    (folder / "model.onnx").touch()
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    args = {
        "model_config": json.dumps({"parameters": {}}),
        "model_repository": str(tmp_path),
        "model_version": "1",
    }
    backend = Mortal(SimpleNamespace(MetricFamily=family), args)
    wait_for(lambda: told.get("phi_serve_ready") == 1, "a ready engine")
    backend.kill()
    wait_for(lambda: told["phi_serve_ready"] == 0, "word of its death")
    backend.close()
