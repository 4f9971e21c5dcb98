"""OpenAI's own client: of a live server, and of a service in this process whose model says what it
is told to, with the tokenizer and chat template of `tiny_chats`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import numpy as np
from numpy.typing import NDArray
from openai import OpenAI

from app.api import create_app
from app.engine import Engine
from app.scheduler import Scheduler
from app.sequence import StepPlan
from app.served import Served
from app.service import Service
from app.text import TextCodec

from .engines import TokenCache, loaded_model, write
from .live import LiveServer
from .services import SETTINGS, running
from .tiny_chats import chat

MODEL = "told"
CONTEXT = 32_768
_SURE = 100.0  # a logit that leaves no other token a chance


def client_of(server: LiveServer, max_retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=max_retries, timeout=60)


class ToldModel:
    """Says `script`, and then its last token for ever; without a script, what its dice say, which
    depends on the row's place alone. `change` may raise or block."""

    def __init__(self, vocab_size: int) -> None:
        self.script: list[int] = []
        self.change: Callable[[StepPlan], None] = lambda plan: None
        self._dice = np.random.default_rng(7).normal(0, 3, (997, vocab_size))

    def forward(self, plan: StepPlan, cache: TokenCache) -> NDArray[np.float32]:
        self.change(plan)
        write(plan, cache)
        logits = np.zeros((len(plan.sampled), self._dice.shape[1]), np.float32)
        for row, sequence in enumerate(plan.sampled):
            at = len(sequence.output_ids)
            if self.script:
                logits[row, self.script[min(at, len(self.script) - 1)]] = _SURE
            else:
                logits[row] = self._dice[(at + sequence.params.seed) % len(self._dice)]
        return logits


class ToldService(Service):
    """The real service on that model."""

    told: ToldModel

    def __init__(self, codec: TextCodec) -> None:
        super().__init__(SETTINGS)
        self.codec = codec

    def _load(self, served: Served) -> Engine:
        vocab_size = self.codec.vocab_size
        served.loaded = loaded_model(MODEL, self.codec, CONTEXT, vocab_size)
        self.told = ToldModel(vocab_size)
        scheduler = Scheduler(4, CONTEXT, 4096, self.codec.eos_ids)
        cache: Any = TokenCache(4)
        return Engine(self.told, cache, scheduler, served.observer)


class Told:
    """A service and its client. `say` is what the model answers from then on, control tokens as
    such, and its end token behind it."""

    def __init__(self, service: ToldService) -> None:
        self.service = service
        app = create_app(service)
        self.flask = app.test_client()
        self.client = OpenAI(
            base_url="http://told/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx2.Client(transport=httpx2.WSGITransport(app)),
        )

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.flask.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.get_json()
        return answer

    @property
    def model(self) -> ToldModel:
        return self.service.told

    def say(self, text: str) -> None:
        codec = self.service.codec
        self.model.script = [*codec.encode(text, parse_special=True), min(codec.eos_ids)]

    def roll(self) -> None:
        """From now on it says anything."""
        self.model.script = []


@contextmanager
def told(name: str) -> Iterator[Told]:
    """With the chat template of that name; ready inside, ended behind."""
    tokenizer = chat(name).tokenizer
    codec = TextCodec(tokenizer, frozenset({tokenizer.eos_token_id}))
    with running(ToldService(codec)) as service:
        yield Told(service)


def failing_at(step: int) -> Callable[[StepPlan], None]:
    """The engine's step of that number, from now on, fails."""
    steps = iter(range(1000))

    def fail(plan: StepPlan) -> None:
        if next(steps) == step:
            raise RuntimeError("the device is lost")

    return fail


def failing_after(event: threading.Event) -> Callable[[StepPlan], None]:
    """Every step that decodes waits for it, and fails."""

    def fail(plan: StepPlan) -> None:
        if plan.decode:
            assert event.wait(60)
            raise RuntimeError("the device is lost")

    return fail


def waiting_for(event: threading.Event) -> Callable[[StepPlan], None]:
    """Every step waits for it."""

    def wait(plan: StepPlan) -> None:
        assert event.wait(60)

    return wait
