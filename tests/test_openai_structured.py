"""Structured answers through OpenAI's own client, of a model that says anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, Literal

import jsonschema_rs
import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from .clients import MODEL, Told, told

ASK: list[Any] = [{"role": "user", "content": "the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "sky": {"enum": ["clear", "grey", 'é🙂\n"']},
        "wind": {"type": "integer", "minimum": 0, "maximum": 12},
        "towns": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["sky", "wind", "towns"],
    "additionalProperties": False,
}


class Sky(Enum):
    CLEAR = "clear"
    GREY = "grey"


class Town(BaseModel):
    name: Annotated[str, Field(max_length=5)]
    is_near: bool


class Weather(BaseModel):
    sky: Sky
    wind: Annotated[int, Field(ge=0, le=12)]
    towns: Annotated[list[Town], Field(max_length=2)]
    note: Literal["hail"] | None


@dataclass
class Wind:
    force: Literal[1, 2, 3]


@pytest.fixture(scope="module", params=["chatml", "phi3-first"])
def model(request: pytest.FixtureRequest) -> Iterator[Told]:
    """Byte-level and SentencePiece tokens."""
    with told(request.param) as ready:
        ready.roll()
        yield ready


@pytest.fixture
def asked(model: Told) -> dict[str, Any]:
    return {"model": MODEL, "messages": ASK, "max_tokens": 400, "seed": 3}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, **more}}


def contents(answer: ChatCompletion) -> list[str]:
    """Of the answers that are whole."""
    return [c.message.content or "" for c in answer.choices if c.finish_reason == "stop"]


@pytest.mark.parametrize("strict", [True, False, None])
def test_answers_fit_their_schema(model: Told, asked: dict[str, Any], strict: bool | None) -> None:
    answer = model.client.chat.completions.create(
        **asked, n=20, response_format=schema_format(SCHEMA, strict=strict)
    )
    assert len(contents(answer)) == 20
    for content in contents(answer):
        jsonschema_rs.validate(SCHEMA, json.loads(content))
    assert len({*contents(answer)}) > 1


def test_json_object_is_any_object(model: Told, asked: dict[str, Any]) -> None:
    for wanted in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a"}}):
        answer = model.client.chat.completions.create(
            **asked | {"max_tokens": 1500}, n=16, response_format=wanted
        )
        assert contents(answer)
        assert all(isinstance(json.loads(content), dict) for content in contents(answer))
        assert {c.finish_reason for c in answer.choices} <= {"stop", "length"}


def test_parse_gives_an_instance_of_the_model(model: Told, asked: dict[str, Any]) -> None:
    answer = model.client.chat.completions.parse(**asked, n=4, response_format=Weather)
    assert all(isinstance(choice.message.parsed, Weather) for choice in answer.choices)
    of_dataclass = model.client.chat.completions.parse(**asked, response_format=Wind)
    assert isinstance(of_dataclass.choices[0].message.parsed, Wind)


def test_stream_is_parsed_to_the_same_instance(model: Told, asked: dict[str, Any]) -> None:
    plain = model.client.chat.completions.parse(**asked, response_format=Weather)
    with model.client.chat.completions.stream(**asked, response_format=Weather) as events:
        partly = [event.parsed for event in events if event.type == "content.delta"]
        final = events.get_final_completion()
    assert final.choices[0].message.parsed == plain.choices[0].message.parsed
    assert len(partly) > 1


# The client's own: it writes the message of `parse` by a type that knows no instance in it.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_parsed_message_goes_into_the_next_request(model: Told, asked: dict[str, Any]) -> None:
    plain = model.client.chat.completions.parse(**asked, response_format=Weather)
    with model.client.chat.completions.stream(**asked, response_format=Weather) as events:
        streamed = events.get_final_completion()
    for answer in (plain, streamed):
        messages = [*ASK, answer.choices[0].message, *ASK]
        again = model.client.chat.completions.parse(
            **asked | {"messages": messages}, response_format=Weather
        )
        assert again.choices[0].message.parsed


def test_answer_that_is_cut_short_is_a_length_and_no_instance(
    model: Told, asked: dict[str, Any]
) -> None:
    asked = asked | {"max_tokens": 5}
    answer = model.client.chat.completions.create(**asked, response_format=schema_format(SCHEMA))
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.LengthFinishReasonError) as short:
        model.client.chat.completions.parse(**asked, response_format=Weather)
    assert short.value.completion.choices[0].finish_reason == "length"
    with (
        pytest.raises(openai.LengthFinishReasonError),
        model.client.chat.completions.stream(**asked, response_format=Weather) as events,
    ):
        events.until_done()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objekt"},
        {"type": "object", "properties": {"a": {"not": {}}}},
        {"$ref": "https://example.org/schema.json"},
        {"type": "string", "pattern": "(?=a)b"},
        {"allOf": [{"const": 1}, {"const": 2}]},
        {"enum": []},
        True,
    ],
)
def test_schema_that_cannot_be_kept_to_is_refused(
    model: Told, asked: dict[str, Any], schema: Any
) -> None:
    for strict in (True, False):
        with pytest.raises(openai.BadRequestError) as refused:
            model.client.chat.completions.create(
                **asked, response_format=schema_format(schema, strict=strict)
            )
        assert (refused.value.param, refused.value.code) == ("response_format", "invalid_value")


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        (schema_format([]), "response_format.json_schema.schema"),
        (schema_format({}, strictly=True), "response_format.json_schema.strictly"),
        (
            {"type": "json_schema", "json_schema": {"name": "a b"}},
            "response_format.json_schema.name",
        ),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ("json_object", "response_format"),
    ],
)
def test_wrong_response_format_is_refused_by_name(
    model: Told, asked: dict[str, Any], wanted: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        model.client.chat.completions.create(**asked, response_format=wanted)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": "x"}, "stop"),
        ({"extra_body": {"stop_token_ids": [5]}}, "stop_token_ids"),
        ({"extra_body": {"min_tokens": 2}}, "min_tokens"),
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos"),
        ({"extra_body": {"allowed_token_ids": [5]}}, "allowed_token_ids"),
        ({"extra_body": {"banned_token_ids": [5]}}, "banned_token_ids"),
    ],
)
def test_fields_against_a_structure_are_refused(
    model: Told, asked: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    for wanted in ({"type": "json_object"}, schema_format(SCHEMA)):
        with pytest.raises(openai.BadRequestError) as refused:
            model.client.chat.completions.create(**asked, response_format=wanted, **fields)
        assert refused.value.param == param


def test_tools_that_are_not_to_be_called_leave_the_structure(
    model: Told, asked: dict[str, Any]
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    wanted: Any = schema_format({"enum": ["hail"]})
    answer = model.client.chat.completions.create(
        **asked, tools=tools, tool_choice="none", response_format=wanted
    )
    assert answer.choices[0].message.content == '"hail"'


def test_logprobs_go_with_a_structure(model: Told, asked: dict[str, Any]) -> None:
    answer = model.client.chat.completions.create(
        **asked, logprobs=True, top_logprobs=2, response_format=schema_format(SCHEMA)
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    spelled = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
    assert spelled.decode() == answer.choices[0].message.content


def test_generate_takes_a_regex_and_a_grammar(model: Told) -> None:
    body: dict[str, Any] = {"prompt": "a", "seed": 3, "n": 1, "max_tokens": 60}
    assert model.post("/generate", body | {"regex": "(yes|no)!"})["text"] in ("yes!", "no!")
    grammar = 'start: day ", " day\nday: "mon" | "tue"'
    text = model.post("/generate", body | {"grammar": grammar})["text"]
    assert {*text.split(", ")} <= {"mon", "tue"}
    text = model.post("/generate", body | {"response_format": schema_format({"enum": [1, "b"]})})
    assert json.loads(text["text"]) in (1, "b")


def test_generate_refuses_what_is_no_regex_and_no_grammar(model: Told) -> None:
    for field, value in (("regex", "("), ("grammar", "start: nothing"), ("regex", "(?=a)")):
        response = model.flask.post("/generate", json={"prompt": "a", field: value})
        assert response.status_code == 400
        assert response.get_json()["error"]["param"] == field
    both = {"prompt": "a", "regex": "a", "grammar": 'start: "a"'}
    response = model.flask.post("/generate", json=both)
    assert response.get_json()["error"]["param"] == "grammar"
