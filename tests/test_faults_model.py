"""Faults in the steps of a real model, tiny, on ONNX Runtime: what it says behind them is what it
said before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

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
from .faults import FAULTS, GENERATE, NUM_ROWS, Ending, Rig, Trap, rigged
from .services import SETTINGS, StubService
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
    """Several answers that begin and end at different steps, so that rows move."""

    def ask() -> list[Ending]:
        with ExitStack() as stack:
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
    survives = fault == "no memory" and place[1] == "forward"
    for ending, expected in zip(endings, good, strict=True):
        assert ending == expected or (ending.code == "model_failure" and not survives)
    assert (endings == good) == survives
    real.recover_rows()
    assert ask() == good
    assert real.get("/health/ready") == 200
    real.check()
