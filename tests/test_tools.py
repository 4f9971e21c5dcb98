"""Tools as clients send them: what is taken, what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import InvalidRequest
from app.tools import HERMES, LLAMA, MAX_TOOLS, MISTRAL, NO_ARGUMENTS, PHI4, parse_tool_use

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **function}}


def refused(*arguments: Any, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_tool_use(*arguments, **options)
    return caught.value


def test_tools_may_be_called_by_default() -> None:
    use = parse_tool_use([tool(), tool("clock", description="The time", strict=True)])
    assert use is not None
    assert [t.name for t in use.callable] == ["weather", "clock"]
    assert (use.is_forced, use.is_parallel) == (False, True)
    assert (use.tools[1].description, use.tools[1].strict) == ("The time", True)


@pytest.mark.parametrize("name", ["a", "a" * 64, "A-b_9"])
def test_name_of_letters_digits_and_two_signs_is_taken(name: str) -> None:
    assert parse_tool_use([tool(name)]) is not None


@pytest.mark.parametrize("name", ["", "a" * 65, "a b", "a\n", "\u00e9", "<think>", 1, None])
def test_other_name_is_refused(name: Any) -> None:
    error = refused([tool(), tool(name)])
    assert error.param == "tools[1].function.name"
    assert "64" in error.message


def test_second_tool_of_a_name_is_refused() -> None:
    assert refused([tool(), tool("b"), tool()]).param == "tools[2].function.name"


def test_as_many_tools_as_the_limit_are_taken() -> None:
    tools = [tool(f"t{i}") for i in range(MAX_TOOLS + 1)]
    assert parse_tool_use(tools[:-1]) is not None
    assert str(MAX_TOOLS) in refused(tools).message


@pytest.mark.parametrize("parameters", [None, {}])
def test_tool_without_parameters_takes_no_arguments(parameters: Any) -> None:
    use = parse_tool_use([tool(parameters=parameters)])
    assert use is not None
    assert use.tools[0].parameters == NO_ARGUMENTS


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"parameters": []}, "tools[0].function.parameters"),
        ({"parameters": {"type": "string"}}, "tools[0].function.parameters"),
        ({"description": 1}, "tools[0].function.description"),
        ({"strict": "yes"}, "tools[0].function.strict"),
        ({"schema": {}}, "tools[0].function.schema"),
    ],
)
def test_function_of_another_shape_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    assert refused([tool(**changes)]).param == param


@pytest.mark.parametrize(
    "given", [None, "weather", {}, {"type": "custom", "custom": {}}, tool() | {"more": 1}]
)
def test_tool_that_is_no_function_is_refused(given: Any) -> None:
    assert refused([given]).param == "tools[0]"


def test_function_that_is_no_object_is_refused() -> None:
    assert refused([{"type": "function", "function": "weather"}]).param == "tools[0].function"


# --- tool_choice ----------------------------------------------------------------------------------


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "is_forced"), [(None, False), ("auto", False), ("required", True)]
)
def test_choice_says_whether_there_must_be_a_call(choice: Any, is_forced: bool) -> None:
    use = parse_tool_use([tool()], choice)
    assert use is not None
    assert use.is_forced is is_forced


def test_no_tool_is_used_with_none() -> None:
    assert parse_tool_use([tool()], "none") is None


def test_named_function_alone_may_be_called_and_once() -> None:
    use = parse_tool_use([tool(), tool("clock")], named("clock"))
    assert use is not None
    assert [t.name for t in use.callable] == ["clock"]
    assert len(use.tools) == 2
    assert (use.is_forced, use.is_parallel) == (True, False)


@pytest.mark.parametrize(
    "choice",
    [
        "any",
        1,
        {},
        named("other"),
        named(1),
        named("weather") | {"x": 1},
        {"type": "allowed_tools"},
    ],
)
def test_other_choice_is_refused(choice: Any) -> None:
    assert refused([tool()], choice).param == "tool_choice"


@pytest.mark.parametrize("tools", [None, []])
def test_choice_without_tools_is_refused(tools: Any) -> None:
    assert refused(tools, "required").param == "tool_choice"
    assert refused(tools, None, True).param == "parallel_tool_calls"
    assert parse_tool_use(tools, "none") is None


def test_tools_with_a_bad_one_are_refused_with_none_too() -> None:
    assert refused([tool("a b")], "none").param == "tools[0].function.name"


# --- formats --------------------------------------------------------------------------------------

CALLS = [{"function": {"name": name, "arguments": {"a": "\u00e9"}}} for name in ("x", "y")]


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        (
            HERMES,
            '<tool_call>\n{"name": "x", "arguments": {"a": "\u00e9"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "y", "arguments": {"a": "\u00e9"}}\n</tool_call>',
        ),
        (
            PHI4,
            '<|tool_call|>[{"name": "x", "arguments": {"a": "\u00e9"}}, '
            '{"name": "y", "arguments": {"a": "\u00e9"}}]<|/tool_call|>',
        ),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "x", "arguments": {"a": "\u00e9"}}, '
            '{"name": "y", "arguments": {"a": "\u00e9"}}]',
        ),
        (
            LLAMA,
            '{"name": "x", "parameters": {"a": "\u00e9"}}\n'
            '{"name": "y", "parameters": {"a": "\u00e9"}}',
        ),
    ],
)
def test_calls_are_written_as_the_model_writes_them(format_: Any, text: str) -> None:
    assert format_.text(CALLS) == text
