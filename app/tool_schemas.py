"""Schemas of tools whose arguments are not promised to fit: what of them can be kept to.

Clients write them for models, not for grammars, with whatever their libraries put in. Pure: dicts
in, dicts out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .schema import KEYWORDS, restricted
from .tools import Tool

ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}

# Whether they can be kept to depends on their values: regular expressions with look-ahead, formats
# of other tools, alternatives that overlap.
_DOUBTFUL = {"pattern", "patternProperties", "format", "multipleOf", "oneOf", "allOf"}
# They may say of further properties what these are.
_TELL_OF_OTHERS = {"if", "then", "else", "not", "dependentSchemas", "propertyNames", *_DOUBTFUL}


def ever_looser(tool: Tool) -> Iterator[dict[str, Any]]:
    """Schemas for a tool's arguments, each permitting more than the one before: a strict tool's is
    the only one, and any object the last one of others."""
    yield tool.parameters
    if not tool.strict:
        for keywords in (KEYWORDS, KEYWORDS - _DOUBTFUL):
            schema = restricted(tool.parameters, keywords)
            if _TELL_OF_OTHERS & (tool.parameters.keys() - schema.keys()):
                schema.setdefault("additionalProperties", True)
            yield schema
        yield ANY_ARGUMENTS
