"""`python -m tests.page_server`: `python -m app` on a model that says what `SCRIPT` is, a byte a
token, whatever it is asked.

`LOAD_GATE` holds the load until the file exists. `HOLD_AT` holds every answer at so many tokens
until the file `HOLD_GATE` exists. With `ENDLESS` the script is said again and again; with `NO_CHAT`
the model has no chat template. Nothing that takes seconds is imported.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from app.detokenizer import Detokenizer
from app.engine import Engine
from app.errors import InvalidRequest
from app.scheduler import Scheduler
from app.sequence import StepPlan
from app.served import Served

from .engines import ScriptedModel, TokenCache
from .stub_server import GatedService, run, wait_for_file

END = 256  # behind the bytes
MAX_LEN = 4096
_PACE_SECONDS = 0.001
_CERTAINTY = 1000.0  # of the script's tokens, whatever the temperature


class Codec:
    """A token for each byte, and one that ends an answer."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def detokenizer(self, _: frozenset[int] = frozenset()) -> Detokenizer:
        return Detokenizer([*(bytes([code]) for code in range(END)), b""])


class Chat:
    marker_ids: dict[str, int] = {}
    tool_format = None

    def __init__(self, roles: list[str]) -> None:
        self.roles = roles

    def render(self, messages: list[dict[str, Any]], _: Any) -> SimpleNamespace:
        if not self.roles:
            raise InvalidRequest("messages: this model has no chat template", param="messages")
        text = "\n".join(message["content"] for message in messages)
        return SimpleNamespace(text=text, token_ids=list(text.encode()))


class HeldModel(ScriptedModel):
    def forward(self, plan: StepPlan, cache: TokenCache) -> Any:
        lengths = [len(sequence.output_ids) for sequence in plan.decode]
        if "HOLD_GATE" in os.environ and int(os.environ["HOLD_AT"]) in lengths:
            wait_for_file(Path(os.environ["HOLD_GATE"]))
        time.sleep(_PACE_SECONDS)
        return super().forward(plan, cache) * _CERTAINTY


class PageServer(GatedService):
    def _load(self, served: Served) -> Engine:
        if "LOAD_GATE" in os.environ:
            wait_for_file(Path(os.environ["LOAD_GATE"]))
        script = list(os.environ["SCRIPT"].encode())
        model = HeldModel(script if "ENDLESS" in os.environ else [*script, END])
        scheduler = Scheduler(4, MAX_LEN, 512, frozenset([END]))
        engine = Engine(model, TokenCache(4), scheduler, served.observer)  # type: ignore[arg-type]
        roles = [] if "NO_CHAT" in os.environ else ["system", "user", "assistant"]
        graph = {"precision": "none", "form": "stub", "provider": "none", "device_fallback": False}
        info = {"model": "stub", "chat_roles": roles} | graph
        served.observer.loaded(info)
        loaded: Any = SimpleNamespace(
            name="stub",
            codec=Codec(),
            max_model_len=MAX_LEN,
            vocab_size=END + 1,
            created_at=0,
            info=info,
            chat=Chat(roles),
            grammars=None,
        )
        served.loaded = loaded
        return engine


if __name__ == "__main__":
    run(PageServer)
