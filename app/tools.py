"""Tools of a chat request, the formats in which models call them, and the texts that teach and show
calls where a chat template has no words for them.

Knows nothing of templates' insides, grammars or HTTP.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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
