"""OpenAI's client on the default model: the examples of its documentation, as they stand there but
for the name of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema_rs
import pytest
from openai import OpenAI
from openai.lib import pydantic_function_tool
from pydantic import BaseModel

from .clients import client_of
from .live import LiveServer

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
WEATHER = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "City and country, e.g. Paris, France"},
        "units": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["location", "units"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a location.",
            "parameters": WEATHER,
            "strict": True,
        },
    }
]


@pytest.fixture(scope="module")
def client(default_server: LiveServer) -> Iterator[OpenAI]:
    with client_of(default_server) as client:
        yield client


def test_chat(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        temperature=0,
        max_completion_tokens=32,
    )
    assert "Paris" in (completion.choices[0].message.content or "")
    assert completion.choices[0].finish_reason == "stop"


def test_chat_with_instructions(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {"role": "developer", "content": "Talk like a pirate."},
            {"role": "user", "content": "Are semicolons optional in JavaScript?"},
        ],
        max_completion_tokens=24,
    )
    message = completion.choices[0].message
    assert message.content and message.role == "assistant"
    assert completion.model == MODEL


def test_stream(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count from 1 to 5."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    stream = client.chat.completions.create(**asked, stream=True)
    texts = [chunk.choices[0].delta.content for chunk in stream]
    said = "".join(text for text in texts if text)
    assert "3" in said and len(texts) > 5
    with client.chat.completions.stream(**asked) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(deltas) == said


def test_completion(client: OpenAI) -> None:
    completion = client.completions.create(
        model=MODEL, prompt="The three primary colors are", max_tokens=8, temperature=0
    )
    assert "primary" in completion.choices[0].text


class CalendarEvent(BaseModel):
    name: str
    day: Literal["Monday", "Friday"]
    participants: list[str]


def test_structured_output(client: OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Extract the event information."},
            {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
        ],
        response_format=CalendarEvent,
        temperature=0,
        max_tokens=120,
    )
    event = completion.choices[0].message.parsed
    assert isinstance(event, CalendarEvent)


def test_function_call_and_its_result(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris today?"}]
    asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 80}
    completion = client.chat.completions.create(
        **asked, messages=messages, tool_choice="required", parallel_tool_calls=False
    )
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    jsonschema_rs.validate(WEATHER, arguments)
    assert "Paris" in arguments["location"]

    messages.append(choice.message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "14 °C and rain"})
    answer = client.chat.completions.create(**asked, messages=messages, tool_choice="none")
    assert answer.choices[0].message.content


class GetWeather(BaseModel):
    location: str
    units: Literal["celsius", "fahrenheit"]


def test_function_of_a_pydantic_model(client: OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris today?"}],
        tools=[pydantic_function_tool(GetWeather)],
        tool_choice={"type": "function", "function": {"name": "GetWeather"}},
        temperature=0,
        max_tokens=80,
    )
    [call] = completion.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
