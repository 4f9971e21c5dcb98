"""Which Lark grammars of users an answer can be held to: embedded schemas are checked, options of
llguidance are not for them, nor are the tokens that end an answer, and what would cost it its stack
or gigabytes is refused. Strings and comments count as rules: where they end only llguidance knows.

Pure: text in, text out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from .schema import prepare_schema

MAX_LARK_CHARS = 32_768
_MAX_LINES = 1000  # a chain of some thousand rules overflows llguidance's stack
_MAX_OPERATORS = 16  # of & and ~: fifty take ten seconds and 650 MB
_NOT_QUOTED = '%json cannot stand in a string or a comment; "%" "json" says it in two strings'


def prepare_lark(grammar: str, end_tokens: Mapping[int, str]) -> str:
    """The grammar, its embedded schemas with our whitespace. `end_tokens` are ids and names of
    those that end an answer. Raises ValueError."""
    pieces, at = [], 0
    for found in re.finditer(r"%json\s*", grammar):
        if found.start() < at:  # written in the schema before
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"the schema behind %json is no JSON: {error} ({_NOT_QUOTED})"
            ) from None
        if not isinstance(schema, dict):
            raise ValueError(f"the schema behind %json must be a JSON object ({_NOT_QUOTED})")
        pieces += [grammar[at : found.start()], f"%json {prepare_schema(schema)}"]
        at = end
    pieces.append(grammar[at:])
    rules = "".join(pieces[::2])
    _check_rules(rules)
    _check_end_tokens(rules, end_tokens)
    return "".join(pieces)


def _check_rules(rules: str) -> None:
    if "%llguidance" in rules:
        raise ValueError("%llguidance: options cannot be given")
    if rules.count("\n") >= _MAX_LINES:
        raise ValueError(f"the grammar has more than {_MAX_LINES} lines")
    if sum(map(rules.count, "&~")) > _MAX_OPERATORS:
        raise ValueError(f"the grammar has more than {_MAX_OPERATORS} of & and ~")


def _check_end_tokens(rules: str, end_tokens: Mapping[int, str]) -> None:
    """An answer ends with any of them, however the grammar goes on."""
    for id_, name in end_tokens.items():
        why = f"the token {id_} ({name}) ends an answer, and cannot stand in a grammar"
        if name.startswith("<") and name in rules:
            raise ValueError(f"{name}: {why}")
        for found in re.finditer(r"<\[([\s\d,^*-]+)\]>", rules):
            if _has(found[1], id_):
                raise ValueError(f"{found[0]}: {why}")


def _has(ids: str, id_: int) -> bool:
    """Is it among them, as `5`, `3-7`, `1,4-6`, `*` or `^5`?"""
    spans = re.findall(r"(\d+)(?:\s*-\s*(\d+))?", ids)
    is_in = any(int(first) <= id_ <= int(last or first) for first, last in spans)
    return "*" in ids or is_in != ("^" in ids)
