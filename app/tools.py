"""Tools of a chat request, the formats in which models call them, and the texts that teach and show
calls where a chat template has no words for them.

Knows nothing of templates' insides, grammars or HTTP.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequest

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: `begin`, then an object or a list of them, then `end`.

    An object holds "name" and, under the key `arguments`, an object. Without `begin`, a call is an
    answer that begins with a brace. `lead` stands between the markers and the JSON.
    """

    name: str
    begin: str
    end: str
    is_list: bool
    arguments: str = "arguments"
    lead: str = ""

    def text(self, calls: list[dict[str, Any]]) -> str:
        """The calls as a model would have written them; OpenAI's, with arguments as objects."""
        objects = [
            {"name": call["function"]["name"], self.arguments: call["function"]["arguments"]}
            for call in calls
        ]
        if self.is_list:
            return f"{self.begin}{as_json(objects)}{self.end}"
        written = [f"{self.begin}{self.lead}{as_json(o)}{self.lead}{self.end}" for o in objects]
        return "\n".join(written)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", False, lead="\n")
PHI4 = ToolFormat("phi4", "<|tool_call|>", "<|/tool_call|>", True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", True)
LLAMA = ToolFormat("llama", "", "", False, arguments="parameters")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]
    description: str | None = None
    strict: bool = False

    def shown(self) -> dict[str, Any]:
        """As templates expect it."""
        said = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **said, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request asks of its tools. `callable` are those that may be called: all, or the one
    that `tool_choice` names. `is_forced`: an answer without a call is none."""

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    is_forced: bool
    is_parallel: bool


def parse_tools(tools: list[Any]) -> tuple[Tool, ...]:
    """OpenAI's `tools`. Raises InvalidRequest."""
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise _wrong("tools", f"{len(tools)} of them; 1 to {MAX_TOOLS} can be given")
    parsed = tuple(_parse_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool.name for tool in parsed]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise _wrong(f"tools[{i}].function.name", f"{name!r} is the name of another tool, too")
    return parsed


def parse_tool_use(
    tools: list[Any] | None, choice: Any = None, is_parallel: bool | None = None
) -> ToolUse | None:
    """OpenAI's `tools`, `tool_choice` ("none", "auto", "required" or a named function; "auto" by
    default) and `parallel_tool_calls` (true by default); None if no tool may be called.

    Raises InvalidRequest.
    """
    if not tools:
        if choice not in (None, "none", "auto") or is_parallel is not None:
            field = "parallel_tool_calls" if is_parallel is not None else "tool_choice"
            raise _wrong(field, "can only be given with tools")
        return None
    parsed = parse_tools(tools)
    parallel = is_parallel is not False
    if choice == "none":
        return None
    if choice in (None, "auto", "required"):
        return ToolUse(parsed, parsed, choice == "required", parallel)
    name = _named(choice)
    chosen = tuple(tool for tool in parsed if tool.name == name)
    if not chosen:
        raise _wrong("tool_choice", f"{name!r} is none of the tools")
    return ToolUse(parsed, chosen, True, False)


def _named(choice: Any) -> str:
    match choice:
        case {"type": "function", "function": {"name": str(name), **inner}, **outer}:
            if not inner and not outer:
                return name
    raise _wrong(
        "tool_choice",
        'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}',
    )


def _parse_tool(tool: Any, at: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function" or len(tool) != 2:
        raise _wrong(at, 'must be {"type": "function", "function": {…}}; there are no other tools')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{at}.function", "must be an object")
    for key in function:
        if key not in ("name", "description", "parameters", "strict"):
            raise _wrong(f"{at}.function.{key}", "not a field of a function")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(f"{at}.function.name", "must be 1 to 64 of the characters A-Z a-z 0-9 _ -")
    if not isinstance(description, str | None):
        raise _wrong(f"{at}.function.description", "must be a string")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _wrong(f"{at}.function.strict", "must be true or false")
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        parameters = NO_ARGUMENTS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _wrong(f"{at}.function.parameters", 'must be a JSON schema of type "object"')
    return Tool(name, parameters, description, bool(strict))


def _wrong(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {why}", param=param)


def as_json(value: Any) -> str:
    """As transformers' templates write it."""
    return json.dumps(value, ensure_ascii=False)


# --- where the template has no words for it ------------------------------------------------------


def instructions(tools: list[dict[str, Any]]) -> str:
    """A system message's text that lists tools and teaches the Hermes format, in the words of
    Qwen2.5's template."""
    listed = "\n".join(map(as_json, tools))
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def response(results: list[str]) -> str:
    """A user message's text that gives the results of calls."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
