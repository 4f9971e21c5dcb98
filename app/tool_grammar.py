"""Tools as a grammar for llguidance: a call is held to its tool's schema.

Text only: what compiles it, and says which schemas can be kept to, is others' business. It must
know added tokens that are not special (`<think>`, `<tool_call>` in Qwen's tokenizers) by their
bytes, as the detokenizer does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .schema import ESCAPES
from .tools import Tool, ToolFormat, ToolUse

# As json.dumps writes it, which is how templates show calls to the model.
_OPTIONS = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": ESCAPES,
}
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties"}
_NOT_SCHEMAS = {"const", "enum", "default", "examples"}


@dataclass(frozen=True, slots=True)
class ToolForm:
    """What tools make of an answer; `marker_ids` are those of the format's markers that are
    special tokens."""

    use: ToolUse
    format: ToolFormat
    marker_ids: Mapping[str, int]

    @property
    def is_held(self) -> bool:
        """Is there anything to hold it to? Not where free text and a call begin alike (Llama's
        format), if it may be either and no tool is strict."""
        return bool(self.is_needed or self.format.begin)

    @property
    def is_needed(self) -> bool:
        """Does the request ask for it: for a call, or for one that keeps to its schema?"""
        return self.use.is_forced or any(tool.strict for tool in self.use.callable)


def tool_grammar(use: ToolUse, format_: ToolFormat, marker_ids: Mapping[str, int]) -> str:
    """Lark text. A forced answer is one call, or one and more if they may be parallel. Else it is
    any text, in which what begins with the format's marker is a call; without a marker, an answer
    that begins with a brace is one.
    """
    begin, end = (_marker(text, marker_ids) for text in (format_.begin, format_.end))
    lead = json.dumps(format_.lead) if format_.lead else ""
    rules = [f"call: %json {json.dumps(call_schema(use.callable, format_.arguments))}"]
    if format_.is_list:
        # A SentencePiece tokenizer puts a space behind a marker.
        many = ' (", " call)*' if use.is_parallel else ""
        rules.append(f'body: " "? "[" call{many} "]" {end}')
    else:
        rules.append(f"body: {lead} call {lead} {end}")
    is_token = format_.begin in marker_ids
    if use.is_forced:
        another = f' ("\\n" {begin} body)*' if _repeats(use, format_) else ""
        return "\n".join([f"start: {begin} body{another}", *rules])
    rules.append("TEXT: /(?s:.*)/")
    if not format_.begin:
        rules[-1] = r"TEXT: /\s*([^{\s](?s:.*))?/"
        return "\n".join([r"start: TEXT | /\s*/ body", *rules])
    # Lazy: the marker's last character ends the text, so none can run on over it.
    rules.append(f"head: TEXT {begin}" if is_token else f"head[lazy]: TEXT {begin}")
    calls = "(head body)* TEXT" if _repeats(use, format_) else "TEXT | head body"
    return "\n".join([f"start: {calls}", *rules])


def _repeats(use: ToolUse, format_: ToolFormat) -> bool:
    """Several calls are several times marker and object."""
    return use.is_parallel and not format_.is_list and bool(format_.begin)


def _marker(text: str, marker_ids: Mapping[str, int]) -> str:
    if text in marker_ids:
        return f"<[{marker_ids[text]}]>"
    return json.dumps(text) if text else ""


def call_schema(tools: tuple[Tool, ...], arguments: str) -> dict[str, Any]:
    """Of one call to any of the tools, whose arguments stand under that key."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments: _arguments(tool)},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    # Where each schema's own references lead.
    homes = {tool.name: _moved(tool.parameters, tool.name) for tool in tools}
    return {"x-guidance": _OPTIONS, "$defs": homes, "anyOf": calls}


def _arguments(tool: Tool) -> dict[str, Any]:
    """A schema that says nothing of other properties means none: a model would invent some."""
    schema: dict[str, Any] = {"type": "object", **_moved(tool.parameters, tool.name)}
    if not _COMBINING & schema.keys():
        schema.setdefault("additionalProperties", False)
    return schema


def _moved(schema: Any, home: str) -> Any:
    """With its references to itself led to `$defs/home`."""
    if isinstance(schema, list):
        return [_moved(item, home) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = f"#/$defs/{home}{value[1:]}"
        elif key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(
            value, dict
        ):
            moved[key] = {name: _moved(inner, home) for name, inner in value.items()}
        elif key in _NOT_SCHEMAS:
            moved[key] = value
        elif key not in ("x-guidance", "$id", "$schema"):
            moved[key] = _moved(value, home)
    return moved
