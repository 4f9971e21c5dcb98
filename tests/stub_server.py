"""`python -m tests.stub_server`: `python -m app` on a stub engine, which waits for files.

`LOAD_GATE` holds the load until the file exists. `STEP_GATE` holds the steps of a full batch; until
then each step takes 5 ms, and where all that run have the priority `TOGETHER`, it waits for the
others, however late they come. With `DEATH_GATE` there is no engine but one that dies behind that
gate. Nothing of torch, transformers or ONNX Runtime is imported, which would take seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import app.service
from app.__main__ import main
from app.config import Settings
from app.detokenizer import Detokenizer
from app.served import Served
from app.service import Service

if TYPE_CHECKING:
    from app.engine import Engine
    from app.sequence import StepPlan

_GIVE_UP_SECONDS = 60.0
_PACE_SECONDS = 0.005
TOGETHER = -1000  # a priority that nothing else asks for
_NUM_IDS = 97  # the stub model's
_INFO = {
    **dict.fromkeys(("model", "precision", "form", "provider"), "stub"),
    "device_fallback": False,
}


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + _GIVE_UP_SECONDS
    while not condition() and time.monotonic() < give_up_at:
        time.sleep(_PACE_SECONDS)


def wait_for_file(path: Path) -> None:
    wait_for(path.exists)


class Mortal:
    """As much of an engine as its thread needs in order to die of it."""

    is_idle = has_failed = False
    num_steps = 0

    def self_test(self) -> None:
        pass

    def step(self) -> None:
        wait_for_file(Path(os.environ["DEATH_GATE"]))
        raise SystemExit("a stub's death")


class Codec:
    """A token for each byte."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [code % _NUM_IDS for code in text.encode()]

    def detokenizer(self, _: frozenset[int] = frozenset()) -> Detokenizer:
        return Detokenizer([bytes([code]) for code in range(_NUM_IDS)])


class GatedService(Service):
    """The load of the model waits for the file LOAD_GATE, if that is set."""

    def prepare(self, settings: Settings) -> Served:
        served = super().prepare(settings)
        if "LOAD_GATE" in os.environ:  # before its thread runs: nothing in the load comes before
            served.bridge.pulse.enter("waiting for a file")
        return served


class StubServer(GatedService):
    def _load(self, served: Served) -> Engine:
        if "LOAD_GATE" in os.environ:
            wait_for_file(Path(os.environ["LOAD_GATE"]))
        if "DEATH_GATE" in os.environ:
            return cast("Engine", Mortal())
        from .engines import stub_engine

        num_rows, max_len = self.settings.max_batch_size or 32, self.settings.max_model_len
        engine, stub = stub_engine(num_rows, max_len, observer=served.observer)
        loaded: Any = SimpleNamespace(
            name="stub",
            codec=Codec(),
            max_model_len=max_len,
            vocab_size=_NUM_IDS,
            created_at=0,
            info=_INFO,
            chat=None,
            grammars=None,
        )
        served.loaded = loaded
        served.observer.loaded(_INFO)
        gate = Path(os.environ.get("STEP_GATE", os.devnull))

        def change(plan: StepPlan, logits: Any) -> None:
            if not gate.exists():
                time.sleep(_PACE_SECONDS)
            if len(plan.decode) == num_rows:
                wait_for_file(gate)
            elif plan.prefill is None and all(s.priority == TOGETHER for s in plan.decode):
                wait_for(lambda: gate.exists() or served.bridge.num_streams > len(plan.decode))

        stub.change = change
        return engine


def run(service: type[Service]) -> NoReturn:
    """`python -m app` with this in the place of its own."""
    app.service.Service = service  # type: ignore[misc]
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run(StubServer)
