"""Which JSON schemas an answer can be held to: every keyword is kept or refused by name.

llguidance ignores keywords that it does not know, and some shapes cost it seconds, gigabytes or the
process's stack; both are found here, before it sees them. Pure: dicts in, dicts out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from .patterns import FORMATS, check_meeting, check_pattern, with_patterns

MAX_SCHEMA_CHARS = 32_768
MAX_DEPTH = 60
_MAX_REFS = 500
_MAX_ALL_OF = 16
_MAX_MULTIPLE = 10_000
_MAX_INTEGER = 2**53  # llguidance reads numbers as doubles

# A blank between tokens, or a new line with its indentation: a model that is unsure could write
# blanks until its tokens are over. No \uXXXX: the name of a property could be written in many ways.
ESCAPES = 'nrbtf\\"'
_OPTIONS = {"whitespace_pattern": r"( |\n {0,16})", "json_allowed_escapes": ESCAPES}
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f]")  # without \uXXXX
# Without bounds a number could have an exponent that makes it infinite.
_MAX_NUMBER = 1e18  # llguidance takes no larger bounds

_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_LISTS = {"prefixItems", "anyOf", "oneOf", "allOf"}
_SCHEMAS = {"items", "additionalProperties", "additionalItems"}
_LEAVES = {
    *{"type", "enum", "const", "$ref", "required", "pattern", "format", "minLength", "maxLength"},
    *{"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    *{"minItems", "maxItems", "minProperties", "maxProperties"},
}
_VALUES = {"const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
# They say nothing of what is valid.
_ANNOTATIONS = {
    *{"$schema", "$id", "$comment", "title", "description", "default", "examples"},
    *{"deprecated", "readOnly", "writeOnly"},
}
KEYWORDS = _MAPS | _LISTS | _SCHEMAS | _LEAVES | _ANNOTATIONS


def prepare_schema(schema: Any) -> str:
    """The schema as llguidance takes it, with our whitespace. Raises ValueError, saying why not."""
    check_size(schema)
    check_schema(schema)
    return json.dumps(narrowed(schema) | {"x-guidance": _OPTIONS})


def check_size(schema: Any) -> None:
    """Raises ValueError for one that is no object, or too large or deep to be looked at."""
    _check_depth(schema)
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA_CHARS:
        raise ValueError(
            f"the schema has {len(text)} characters, at most {MAX_SCHEMA_CHARS} can be"
        )
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")


def check_schema(schema: dict[str, Any]) -> None:
    """Raises ValueError, saying what in it cannot be kept to; its size is checked already."""
    parts = list(_subschemas(schema))
    for part in parts:
        _check_keywords(part)
        _check_shape(part)
        _check_values(part)
    if any("$id" in part for part in parts[1:]):  # references in it would lead elsewhere
        raise ValueError("$id is supported at the top of the schema only")
    num_refs = sum("$ref" in part for part in parts)
    if num_refs > _MAX_REFS:
        raise ValueError(f"the schema has {num_refs} $ref, at most {_MAX_REFS} can be")
    num_all_of = sum(len(part.get("allOf", ())) for part in parts)
    if num_all_of > _MAX_ALL_OF:
        raise ValueError(
            f"the schema has {num_all_of} parts in allOf, at most {_MAX_ALL_OF} can be"
        )
    check_meeting(schema, parts)


def narrowed(schema: Any) -> Any:
    """What llguidance keeps to is a bit less than what it says: where it would permit what a
    validator refuses, the schema with tighter keywords."""
    if not isinstance(schema, dict):
        return schema
    narrow: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            narrow[keyword] = {name: narrowed(part) for name, part in value.items()}
        elif keyword in _LISTS | {"items"} and isinstance(value, list):
            narrow[keyword] = [narrowed(part) for part in value]
        else:
            narrow[keyword] = narrowed(value) if keyword in _SCHEMAS else value
    return with_patterns(_bounded(narrow))


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Its numbers between bounds, and so without exponents."""
    types = schema.get("type")
    is_number = "number" in (types if isinstance(types, list) else [types])
    if not is_number or {"enum", "const"} & schema.keys():
        return schema
    bounds = {}
    if not {"minimum", "exclusiveMinimum"} & schema.keys():
        bounds["minimum"] = -_MAX_NUMBER
    if not {"maximum", "exclusiveMaximum"} & schema.keys():
        bounds["maximum"] = _MAX_NUMBER
    return schema | bounds


def restricted(schema: Any, keywords: Collection[str]) -> Any:
    """Without other keywords, in it and in the schemas that it holds."""
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword not in keywords:
            continue
        if keyword in _MAPS and isinstance(value, dict):
            kept[keyword] = {name: restricted(part, keywords) for name, part in value.items()}
        elif keyword in _LISTS | {"items"} and isinstance(value, list):
            kept[keyword] = [restricted(part, keywords) for part in value]
        elif keyword in _SCHEMAS:
            kept[keyword] = restricted(value, keywords)
        else:
            kept[keyword] = value
    return kept


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


def _check_keywords(schema: dict[str, Any]) -> None:
    if unknown := sorted(schema.keys() - KEYWORDS):
        raise ValueError(
            f"the keyword {unknown[0]!r} is not supported; these are: {', '.join(sorted(KEYWORDS))}"
        )
    if any(_has_large_integer(schema[key]) for key in _VALUES & schema.keys()):
        raise ValueError("integers beyond 2**53 are not supported")
    multiple = schema.get("multipleOf", 1)
    digits = re.sub(r"\D|e.*", "", str(multiple))
    if not isinstance(multiple, int | float) or "e" in str(multiple) or int(digits) > _MAX_MULTIPLE:
        raise ValueError(f"multipleOf: {multiple} has too many digits, or is no number")
    if multiple <= 0:
        raise ValueError(f"multipleOf: {multiple} must be more than 0")


def _check_shape(schema: dict[str, Any]) -> None:
    for keywords, kind, name in ((_MAPS, dict, "an object"), (_LISTS, list, "a list")):
        for keyword in keywords & schema.keys():
            if not isinstance(schema[keyword], kind):
                raise ValueError(f"{keyword} must be {name}")


def _check_values(schema: dict[str, Any]) -> None:
    """Of keywords that llguidance reads otherwise than validators, or takes whatever they say."""
    if "pattern" in schema:
        check_pattern(schema["pattern"])
    for pattern in schema.get("patternProperties", ()):
        check_pattern(pattern)
    format_ = schema.get("format")
    if format_ is not None and format_ not in FORMATS:
        raise ValueError(f"Unknown format: {format_}; these are: {', '.join(sorted(FORMATS))}")
    written = [schema.get(key) for key in ("const", "enum", "required")]
    written += [list(schema.get(key, ())) for key in ("properties", "patternProperties")]
    if unwritable := _UNWRITABLE.search("".join(_strings(written))):
        code = f"U+{ord(unwritable[0]):04X}"
        raise ValueError(f"the control character {code} in a value or a name is not supported")
    # One property written twice would count as two.
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if isinstance(least, int) and isinstance(required, list | tuple):
        num_required = max(1, len({*map(str, required)}))
        if least > num_required:
            raise ValueError(
                f"minProperties: {least} is more than the {num_required} that required ensures"
            )


def _strings(value: Any) -> Iterator[str]:
    """All that are in a JSON value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        yield from _strings([*value, *value.values()])


def _has_large_integer(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_large_integer, value.values()))
    if isinstance(value, list):
        return any(map(_has_large_integer, value))
    return isinstance(value, int) and abs(value) > _MAX_INTEGER
