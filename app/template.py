"""What a model's chat template writes out: which roles, tools, calls and results of calls.

A template is a program: what it does is found by letting it write conversations of sentinels. What
it has no words for is written in others (`adapt`), so nothing that a client sends is lost.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .call_json import ToolCall
from .tool_calls import ToolParser
from .tools import HERMES, LLAMA, MISTRAL, PHI4, ToolFormat, as_json, instructions, response

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]
Apply = Callable[[list[Message], list[dict[str, Any]] | None], str]

_SAID, _TOOL, _CALLED = "sentinel-of-a-message", "sentinel_tool", "sentinel_call"
_ARGUMENTS = {"sentinel_key": "sentinel_value"}
_ASK = {"role": "user", "content": "?"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "?",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """`tools`: the template lists tools, reads a list in its system message (Phi-4-mini), or has no
    words for them. `format` is that of the calls that the model is taught; None: unknown."""

    roles: tuple[str, ...]
    tools: Literal["template", "system", "prompt"]
    writes_calls: bool
    writes_results: bool
    format: ToolFormat | None


def probe(apply: Apply, source: str, has_token: Callable[[str], bool]) -> TemplateFacts:
    """`source` is the template's text, `has_token` tells which control tokens the model has."""
    roles = tuple(role for role in ROLES if _writes_role(apply, source, role))
    tools = _find_tools(apply)
    with_call = _try(apply, _called("?"), None)
    writes_calls = _CALLED in with_call and "sentinel_value" in with_call
    format_: ToolFormat | None
    if tools == "prompt":
        format_ = HERMES
    elif writes_calls:
        format_ = _format_of(with_call)
    else:
        format_ = _taught(source, has_token)
    return TemplateFacts(roles, tools, writes_calls, "tool" in roles, format_)


def _try(apply: Apply, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
    try:
        return apply(messages, tools)
    except Exception:  # a template is a program: `raise_exception`, or an error of its own
        return ""


def _writes_role(apply: Apply, source: str, role: str) -> bool:
    turn = {"role": role, "content": _SAID}
    conversations = {
        "user": [turn],
        "assistant": [_ASK, turn, _ASK],
        "tool": _called(_SAID),
    }
    messages = conversations.get(role, [turn, _ASK])
    if role in ("developer", "tool") and not re.search(rf"""["']{role}["']""", source):
        return False  # one that writes any role: its model has not learnt this one
    return _SAID in _try(apply, messages, None)


def _called(result: str) -> list[Message]:
    function = {"name": _CALLED, "arguments": _ARGUMENTS}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    answer = {"role": "tool", "content": result, "tool_call_id": "abcdefghi", "name": _CALLED}
    return [_ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, answer]


def _find_tools(apply: Apply) -> Literal["template", "system", "prompt"]:
    if _TOOL in _try(apply, [_ASK], [_PROBE_TOOL]):
        return "template"
    system = {"role": "system", "content": "?", "tools": as_json([_PROBE_TOOL["function"]])}
    return "system" if _TOOL in _try(apply, [system, _ASK], None) else "prompt"


def _format_of(text: str) -> ToolFormat | None:
    """The format in which the template has written the sentinel call."""
    for format_ in (HERMES, PHI4, MISTRAL, LLAMA):
        parser = ToolParser(format_, {_CALLED})
        # A call without a marker begins its turn.
        start = text.find(f'{{"name": "{_CALLED}"') if not format_.begin else 0
        parts = [*parser.feed(text[start:]), *parser.flush()] if start >= 0 else []
        if ToolCall(_CALLED, as_json(_ARGUMENTS)) in parts:
            return format_
    return None


def _taught(source: str, has_token: Callable[[str], bool]) -> ToolFormat | None:
    """The format of a model whose template shows tools but no calls."""
    if "<|tool|>" in source and has_token(PHI4.begin):
        return PHI4
    if HERMES.begin in source and "arguments" in source and "<function=" not in source:
        return HERMES
    return None


# --- saying it in other words --------------------------------------------------------------------


def adapt(
    messages: list[Message], tools: list[dict[str, Any]] | None, facts: TemplateFacts
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Messages and tools as the template can write them.

    Calls carry their arguments as objects. What is put in here may hold control tokens: it runs on
    messages in which the user's are replaced already.
    """
    adapted: list[Message] = []
    for message in messages:
        if message["role"] == "developer" and "developer" not in facts.roles:
            message = {**message, "role": "system"}
        calls = message.get("tool_calls")
        if calls and not facts.writes_calls:
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            told = (facts.format or HERMES).text(calls)
            message["content"] = "\n".join(part for part in (message["content"], told) if part)
        elif facts.format is MISTRAL:
            message = _with_short_ids(message)
        adapted.append(message)
    if not facts.writes_results:
        adapted = _results_as_user(adapted)
    if tools and facts.tools != "template":
        adapted, tools = _tools_in_text(adapted, tools, facts), None
    return adapted, tools


def _results_as_user(messages: list[Message]) -> list[Message]:
    """Results of calls as messages of the user; those in a row become one."""
    adapted: list[Message] = []
    results: list[str] = []
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool":
            results.append(message["content"])
            continue
        if results:
            adapted.append({"role": "user", "content": response(results)})
            results = []
        if message is not None:
            adapted.append(message)
    return adapted


def _tools_in_text(
    messages: list[Message], tools: list[dict[str, Any]], facts: TemplateFacts
) -> list[Message]:
    """Tools in the system message, or in front of what the user says first."""
    is_system = bool(messages) and messages[0]["role"] == "system"
    if facts.tools == "system":
        functions = as_json([tool["function"] for tool in tools])
        first = messages[0] if is_system else {"role": "system", "content": ""}
        return [{**first, "tools": functions}, *messages[is_system:]]
    told = instructions(tools)
    if not is_system and "system" in facts.roles:
        return [{"role": "system", "content": told}, *messages]
    at = next((i for i, m in enumerate(messages) if is_system or m["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": told}, *messages]
    said = messages[at]["content"]
    parts = (said, told) if is_system else (told, said)
    with_tools = {**messages[at], "content": "\n\n".join(part for part in parts if part)}
    return [*messages[:at], with_tools, *messages[at + 1 :]]


def _with_short_ids(message: Message) -> Message:
    """Mistral's templates refuse ids of calls that are not nine letters and digits."""

    def short(id_: str) -> str:
        is_short = re.fullmatch(r"[a-zA-Z0-9]{9}", id_)
        return id_ if is_short else hashlib.sha256(id_.encode()).hexdigest()[:9]

    message = dict(message)
    if "tool_call_id" in message:
        message["tool_call_id"] = short(message["tool_call_id"])
    if "tool_calls" in message:
        message["tool_calls"] = [{**c, "id": short(c["id"])} for c in message["tool_calls"]]
    return message
