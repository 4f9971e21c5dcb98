"""Faults in the steps of a real model, tiny, on ONNX Runtime: what it says behind them is what it
said before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import app.engine
from app.engine import Engine
from app.kv_cache import KVCache
from app.masks import MaskWorker
from app.model import OnnxModel
from app.served import Served
from app.text import TextCodec

from .conftest import TinyModel
from .engines import StubModel, loaded_model, real_engine
from .faults import FAULTS, GENERATE, LIMIT_SECONDS, NUM_ROWS, Ending, Rig, Trap, rigged
from .services import SETTINGS, StubService, hold_until, until
from .wire import Client


class RealService(StubService):
    """With a tiny model on ONNX Runtime."""

    def __init__(self, folder: Path) -> None:
        super().__init__(replace(SETTINGS, max_batch_size=NUM_ROWS))
        self._folder = folder
        self.stub = StubModel()  # for what asks for it; it is never run

    def _load(self, served: Served) -> Engine:
        engine = real_engine(self._folder, NUM_ROWS, 4, 64)
        engine._observer = served.observer
        codec = TextCodec.load(self._folder)
        served.loaded = loaded_model("tiny", codec, 64, codec.vocab_size)
        return engine


@pytest.fixture(scope="module")
def real(tiny_llama: TinyModel) -> Iterator[Rig]:
    with rigged(RealService(tiny_llama.folder), [GENERATE]) as rig:
        yield rig


REAL_PLACES = {
    "prefill": (OnnxModel, "forward", 1),
    "decode": (OnnxModel, "forward", 9),
    "cache": (KVCache, "apply", 9),
    "sampler": (app.engine, "sample", 9),
    "masks": (MaskWorker, "collect", 9),
}


@pytest.mark.parametrize("fault", ["raises", "half", "no memory"])
@pytest.mark.parametrize("name", REAL_PLACES)
def test_real_model_says_the_same_behind_a_fault(
    real: Rig, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several answers that begin and end at different steps, so that rows move. They come at once:
    memory that runs out in the cache costs a row that runs alone its answer."""

    def ask() -> list[Ending]:
        with ExitStack() as stack:
            stack.enter_context(real.hold_until_submitted(6))
            clients = [stack.enter_context(Client(real.port)) for _ in range(6)]
            for number, client in enumerate(clients):
                body = {"prompt": "the tea " * (1 + number % 2), "max_tokens": 4 + 3 * number}
                real.send(client, GENERATE, ignore_eos=True, **body)
            return [real.read(client) for client in clients]

    real.begin()
    good = ask()
    assert all(ending.status == 200 for ending in good)
    *place, skip = REAL_PLACES[name]
    trap = Trap(monkeypatch, *place)
    trap.set(FAULTS[fault], skip)
    endings = ask()
    trap.free()
    survives = fault == "no memory" and place[1] in ("forward", "apply")
    for ending, expected in zip(endings, good, strict=True):
        assert ending == expected or (ending.code == "model_failure" and not survives)
    assert (endings == good) == survives
    real.recover_rows()
    assert ask() == good
    assert real.get("/health/ready") == 200
    real.check()


def test_logits_that_are_not_finite_fail_their_rows_and_end_readiness_until_a_step_is_good(
    real: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(forward: Callable[[], Any]) -> Any:
        return np.full_like(forward(), np.nan)

    real.begin()
    good = real.ask()
    trap = Trap(monkeypatch, OnnxModel, "forward")
    trap.set(spoil, is_for_ever=True)
    assert [real.ask().code for _ in range(2)] == ["model_failure"] * 2
    assert (real.get("/health/live"), real.get("/health/ready")) == (200, 503)
    trap.free()
    assert real.ask() == good
    assert real.get("/health/ready") == 200
    real.check()


def test_slow_steps_change_no_answer(real: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real.begin()
    good = real.ask()
    trap = Trap(monkeypatch, OnnxModel, "forward")
    trap.set(FAULTS["slow"], is_for_ever=True)
    assert real.ask() == good
    assert trap.has_sprung
    real.check()


def test_step_that_hangs_ends_readiness_and_goes_on_where_it_stood(
    real: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hang(forward: Callable[[], Any]) -> Any:
        hold_until(released.is_set)
        return forward()

    real.begin()
    good = real.ask()
    trap = Trap(monkeypatch, OnnxModel, "forward")
    trap.set(hang, 2)
    with Client(real.port) as client:
        real.send(client)
        until(lambda: trap.has_sprung)
        real.clock.now += LIMIT_SECONDS + 1
        assert (real.get("/health/live"), real.get("/health/ready")) == (200, 503)
        assert real.ask().code == "not_ready"
        released.set()
        assert real.read(client) == good
    assert real.get("/health/ready") == 200
    real.check()
