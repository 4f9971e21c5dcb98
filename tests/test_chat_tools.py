"""Tools over HTTP, on a model that says anything: what comes out is the grammar's doing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gevent
import jsonschema_rs
import pytest
from flask.testing import FlaskClient

from app.api import create_app
from app.engine import Engine
from app.served import Served
from app.service import Service
from app.text import TextCodec

from .engines import loaded_model, noise_engine
from .services import SETTINGS
from .tiny_chats import chat

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo", None]}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER], "seed": 5}


class NoiseService(Service):
    """The real service on an engine that says anything."""

    def __init__(self, name: str) -> None:
        super().__init__(SETTINGS)
        self._name = name

    def _load(self, served: Served) -> Engine:
        tokenizer = chat(self._name).tokenizer
        codec = TextCodec(tokenizer, frozenset([tokenizer.eos_token_id]))
        served.loaded = loaded_model("noise", codec, 4096, codec.vocab_size)
        return noise_engine(codec.vocab_size, codec.eos_ids)

    def lose_grammars(self) -> None:
        self.current.loaded = replace(self.current.model, grammars=None)


@pytest.fixture(scope="module", params=["qwen", "phi4"])
def service(request: pytest.FixtureRequest) -> Iterator[NoiseService]:
    service = NoiseService(request.param)
    service.bridge.start()
    with gevent.Timeout(60):
        while not service.bridge.is_ready:
            gevent.sleep(0.001)
    yield service
    service.bridge.request_stop()
    assert service.bridge.ended.wait(60)


@pytest.fixture(scope="module")
def client(service: NoiseService) -> FlaskClient:
    return create_app(service).test_client()


def ask(client: FlaskClient, **fields: Any) -> tuple[int, dict[str, Any]]:
    response = client.post("/v1/chat/completions", json=BODY | fields)
    answer: dict[str, Any] = response.get_json()
    return response.status_code, answer


def weather(strict: bool, schema: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "weather", "parameters": schema, "strict": strict}
    return {"type": "function", "function": function}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("strict", [False, True])
def test_forced_call_fits_its_schema(client: FlaskClient, choice: Any, strict: bool) -> None:
    fields = {"tool_choice": choice, "tools": [weather(strict, CITY)], "n": 3}
    status, answer = ask(client, **fields, parallel_tool_calls=False)
    assert status == 200, answer
    for one in answer["choices"]:
        assert one["finish_reason"] == "tool_calls"
        assert one["message"]["content"] is None
        [call] = one["message"]["tool_calls"]
        jsonschema_rs.validate(CITY, json.loads(call["function"]["arguments"]))


def test_schema_that_cannot_be_kept_is_an_error_for_a_strict_tool_alone(
    client: FlaskClient,
) -> None:
    status, answer = ask(client, tools=[weather(False, UNIQUE)], tool_choice="required")
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "tool_calls")
    status, answer = ask(client, tools=[weather(True, UNIQUE)], tool_choice="required")
    assert status == 400
    assert answer["error"]["param"] == "tools[0].function.parameters"
    assert "'uniqueItems' is not supported" in answer["error"]["message"]


def test_forced_calls_need_a_tokenizer_that_grammars_can_be_made_for(
    service: NoiseService, client: FlaskClient
) -> None:
    model = service.current.model
    service.lose_grammars()
    try:
        status, answer = ask(client, tool_choice="required")
        status_of_auto, _ = ask(client, max_tokens=5)
    finally:
        service.current.loaded = model
    assert (status, status_of_auto) == (400, 200)
    assert "this model's tokenizer" in answer["error"]["message"]
