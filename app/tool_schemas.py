"""What of tools' schemas an answer can be held to: all of a strict one, of others what can be kept.

Clients write them for models, not for grammars, with whatever their libraries put in. What compiles
is handed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from .errors import InvalidRequest
from .schema import KEYWORDS, check_schema, check_size, narrowed, restricted
from .tool_grammar import ToolForm, call_schema, tool_grammar
from .tools import Tool

MAX_TOOLS_CHARS = 131_072  # of all tools' schemas together

_ANY: dict[str, Any] = {"type": "object", "additionalProperties": True}
# Whether they can be kept to depends on their values: regular expressions with look-ahead, formats
# of other tools, alternatives that overlap.
_DOUBTFUL = {
    *{"pattern", "patternProperties", "format", "multipleOf", "minProperties", "oneOf", "allOf"},
}
# They may say of further properties what these are.
_TELL_OF_OTHERS = {"if", "then", "else", "not", "dependentSchemas", "propertyNames", *_DOUBTFUL}

T = TypeVar("T")
Compile = Callable[[str, str], T]  # Lark text, and the field that messages name


def compile_tools(form: ToolForm, param: str, compile_: Compile[T]) -> T:
    """A grammar of calls, and of what else may be said. Raises InvalidRequest about the field of a
    strict tool's schema that cannot be kept, or of one that is too large, or about `param`.

    `compile_` raises InvalidRequest for what cannot be compiled.
    """
    fields = _fields(form, param)
    kept = tuple(_kept(tool, form, fields[tool.name], compile_) for tool in form.use.callable)
    try:
        return compile_(_lark(form, kept), param)
    except InvalidRequest:  # each alone is small enough, but not all of them
        if all(tool.strict for tool in kept):
            raise
    opened = tuple(tool if tool.strict else replace(tool, parameters=_ANY) for tool in kept)
    return compile_(_lark(form, opened), param)


def _fields(form: ToolForm, param: str) -> dict[str, str]:
    """Where the schema of each tool stands in the request; their sizes are checked."""
    names = [tool.name for tool in form.use.tools]
    fields = {name: f"{param}[{i}].function.parameters" for i, name in enumerate(names)}
    length = 0
    for tool in form.use.callable:
        try:
            check_size(tool.parameters)
        except ValueError as error:
            raise _wrong(fields[tool.name], error) from None
        length += len(json.dumps(tool.parameters))
    if length > MAX_TOOLS_CHARS:
        why = f"{length} characters of parameters, at most {MAX_TOOLS_CHARS} can be"
        raise _wrong(param, why)
    return fields


def _kept(tool: Tool, form: ToolForm, field: str, compile_: Compile[T]) -> Tool:
    """With the first of ever looser schemas that can be kept to."""
    refused: InvalidRequest | None = None
    for schema in _ever_looser(tool):
        try:
            check_schema(schema)
            kept = replace(tool, parameters=narrowed(schema))
            call = json.dumps(call_schema((kept,), form.format.arguments))
            compile_(f"start: %json {call}", field)
            return kept
        except ValueError as error:
            refused = refused or _wrong(field, error)
        except InvalidRequest as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _ever_looser(tool: Tool) -> Iterator[dict[str, Any]]:
    """Schemas for a tool's arguments, each permitting more than the one before: a strict tool's is
    the only one, and any object the last one of others."""
    yield tool.parameters
    if not tool.strict:
        for keywords in (KEYWORDS, KEYWORDS - _DOUBTFUL):
            schema = restricted(tool.parameters, keywords)
            if _TELL_OF_OTHERS & (tool.parameters.keys() - schema.keys()):
                schema.setdefault("additionalProperties", True)
            yield schema
        yield _ANY


def _lark(form: ToolForm, tools: tuple[Tool, ...]) -> str:
    return tool_grammar(replace(form.use, callable=tools), form.format, form.marker_ids)


def _wrong(field: str, why: object) -> InvalidRequest:
    return InvalidRequest(f"{field}: {why}", param=field)
