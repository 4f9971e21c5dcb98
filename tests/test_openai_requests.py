"""What the bodies of OpenAI's routes ask for, once they are valid."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.openai_requests import MAX_TOOLS, ChatRequest, RenderRequest
from app.protocol import parse
from app.tools import NO_ARGUMENTS

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ASK = {"role": "user", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **function}}


def asked(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, orjson.dumps({"messages": [ASK]} | fields))


# --- tools ----------------------------------------------------------------------------------------


def test_tools_may_be_called_by_default() -> None:
    use = asked(tools=[tool(), tool("clock", description="The time", strict=True)]).tool_use()
    assert use is not None
    assert [t.name for t in use.callable] == ["weather", "clock"]
    assert (use.is_forced, use.is_parallel) == (False, True)
    assert (use.tools[0].parameters, use.tools[0].strict) == (SCHEMA, False)
    assert (use.tools[1].description, use.tools[1].strict) == ("The time", True)


@pytest.mark.parametrize("name", ["a", "a" * 64, "A-b_9"])
def test_name_of_letters_digits_and_two_signs_is_taken(name: str) -> None:
    assert asked(tools=[tool(name)]).tool_use() is not None


def test_as_many_tools_as_the_limit_are_taken() -> None:
    use = asked(tools=[tool(f"t{i}") for i in range(MAX_TOOLS)]).tool_use()
    assert use is not None
    assert len(use.tools) == MAX_TOOLS


@pytest.mark.parametrize("function", [{"parameters": None}, {"parameters": {}}, {}])
def test_tool_without_parameters_takes_no_arguments(function: dict[str, Any]) -> None:
    given = {"type": "function", "function": {"name": "f"} | function}
    use = asked(tools=[given]).tool_use()
    assert use is not None
    assert use.tools[0].parameters == NO_ARGUMENTS


def test_schema_that_does_not_say_its_type_is_an_objects() -> None:
    use = asked(tools=[tool(parameters={"properties": {}})]).tool_use()
    assert use is not None
    assert use.tools[0].parameters == {"properties": {}}


@pytest.mark.parametrize(
    ("choice", "is_forced"), [(None, False), ("auto", False), ("required", True)]
)
def test_choice_says_whether_there_must_be_a_call(choice: Any, is_forced: bool) -> None:
    use = asked(tools=[tool()], tool_choice=choice).tool_use()
    assert use is not None
    assert use.is_forced is is_forced


def test_no_tool_is_used_with_none() -> None:
    assert asked(tools=[tool()], tool_choice="none").tool_use() is None
    assert asked(tool_choice="none").tool_use() is None


@pytest.mark.parametrize(("given", "is_parallel"), [(None, True), (True, True), (False, False)])
def test_calls_are_parallel_unless_it_is_declined(given: Any, is_parallel: bool) -> None:
    use = asked(tools=[tool()], parallel_tool_calls=given).tool_use()
    assert use is not None
    assert use.is_parallel is is_parallel


def test_named_function_alone_may_be_called_and_once() -> None:
    choice = {"type": "function", "function": {"name": "clock"}}
    use = asked(tools=[tool(), tool("clock")], tool_choice=choice).tool_use()
    assert use is not None
    assert [t.name for t in use.callable] == ["clock"]
    assert len(use.tools) == 2
    assert (use.is_forced, use.is_parallel) == (True, False)


def test_all_tools_are_shown_where_nothing_is_generated() -> None:
    body = orjson.dumps({"messages": [ASK], "tools": [tool(), tool("clock")]})
    use = parse(RenderRequest, body).tool_use()
    assert use is not None
    assert [t.name for t in use.tools] == ["weather", "clock"]


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ASK | {"name": None}, ASK),
        (ASK | {"name": "Ann"}, ASK | {"name": "Ann"}),
        (
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "", "b")]},
            {"role": "user", "content": "ab"},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL], "annotations": []},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"index": 0}], "refusal": None},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (
            {"role": "tool", "content": "b", "tool_call_id": "c"},
            {"role": "tool", "content": "b", "tool_call_id": "c"},
        ),
    ],
)
def test_templates_get_text_and_what_is_given(
    given: dict[str, Any], message: dict[str, Any]
) -> None:
    assert asked(messages=[given]).template_messages == [message]
