"""Which JSON schemas an answer can be held to: every keyword is kept or refused by name.

llguidance ignores keywords that it does not know, and some shapes cost it seconds, gigabytes or the
process's stack; both are found here, before it sees them. Pure: dicts in, dicts out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_SCHEMA_CHARS = 32_768
MAX_DEPTH = 60
_MAX_REFS = 500
_MAX_ALL_OF = 16
_MAX_MULTIPLE = 10_000
_MAX_INTEGER = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

# A blank between tokens, or a new line with its indentation: a model that is unsure could write
# blanks until its tokens are over.
_OPTIONS = {"whitespace_pattern": r"( |\n {0,16})"}

_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_LISTS = {"prefixItems", "anyOf", "oneOf", "allOf"}
_SCHEMAS = {"items", "additionalProperties", "additionalItems"}
_LEAVES = {
    *{"type", "enum", "const", "$ref", "required", "pattern", "format", "minLength", "maxLength"},
    *{"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    *{"minItems", "maxItems", "minProperties", "maxProperties"},
}
# They say nothing of what is valid.
_ANNOTATIONS = {
    *{"$schema", "$id", "$comment", "title", "description", "default", "examples"},
    *{"deprecated", "readOnly", "writeOnly"},
}
KEYWORDS = _MAPS | _LISTS | _SCHEMAS | _LEAVES | _ANNOTATIONS


def prepare_schema(
    schema: Any, options: dict[str, Any] | None = None, max_chars: int = MAX_SCHEMA_CHARS
) -> str:
    """The schema as llguidance takes it, with our whitespace or other `options` of its own. Raises
    ValueError, saying why not; if they are lenient, unknown keywords are no reason, and patterns
    that only a backtracking engine could match are taken out of `schema`."""
    options = _OPTIONS if options is None else options
    _check_depth(schema)
    text = json.dumps(schema)
    if len(text) > max_chars:
        raise ValueError(f"the schema has {len(text)} characters, at most {max_chars} can be")
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    parts = list(_subschemas(schema))
    is_lenient = bool(options.get("lenient"))
    for part in parts:
        if is_lenient and _is_beyond_regex(part.get("pattern")):
            del part["pattern"]
        _check_keywords(part, is_lenient=is_lenient)
    num_refs = sum("$ref" in part for part in parts)
    if num_refs > _MAX_REFS:
        raise ValueError(f"the schema has {num_refs} $ref, at most {_MAX_REFS} can be")
    num_all_of = sum(len(part.get("allOf", ())) for part in parts)
    if num_all_of > _MAX_ALL_OF:
        raise ValueError(
            f"the schema has {num_all_of} parts in allOf, at most {_MAX_ALL_OF} can be"
        )
    return json.dumps(schema | {"x-guidance": options})


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return
    raise ValueError(f"the schema is nested more than {MAX_DEPTH} levels deep")


def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for keyword, value in schema.items():
        children: list[Any] = []
        if keyword in _MAPS and isinstance(value, dict):
            children = list(value.values())
        elif keyword in _LISTS | {"items"} and isinstance(value, list):
            children = value
        elif keyword in _SCHEMAS:
            children = [value]
        for child in children:
            if isinstance(child, dict):
                yield from _subschemas(child)


def _is_beyond_regex(pattern: Any) -> bool:
    """Look-around and back references (pydantic's Decimal has the one)."""
    return isinstance(pattern, str) and re.search(r"\(\?<?[=!]|\\[1-9]", pattern) is not None


def _too_large(value: Any) -> Iterator[str]:
    """Whole numbers that no double holds, as which llguidance keeps them."""
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        yield str(value)
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _too_large(child)


def _check_keywords(schema: dict[str, Any], *, is_lenient: bool) -> None:
    if not is_lenient and (unknown := sorted(schema.keys() - KEYWORDS)):
        raise ValueError(
            f"the keyword {unknown[0]!r} is not supported; these are: {', '.join(sorted(KEYWORDS))}"
        )
    values = [schema.get("const"), schema.get("enum"), *map(schema.get, _BOUNDS)]
    if not is_lenient and (large := next(_too_large(values), None)) is not None:
        raise ValueError(f"the number {large:.100} is beyond {_MAX_INTEGER}, and would be rounded")
    multiple = schema.get("multipleOf", 1)
    digits = re.sub(r"\D|e.*", "", str(multiple))
    if not isinstance(multiple, int | float) or "e" in str(multiple) or int(digits) > _MAX_MULTIPLE:
        raise ValueError(f"multipleOf: {multiple} has too many digits, or is no number")
