"""Which Lark grammars of users an answer can be held to: embedded schemas are checked, options of
llguidance are not for them, and what would cost it its stack or gigabytes is refused.

Pure: text in, text out.
"""

from __future__ import annotations

import json
import re

from .schema import prepare_schema

MAX_LARK_CHARS = 32_768
_MAX_LINES = 1000  # a chain of some thousand rules overflows llguidance's stack
_MAX_OPERATORS = 16  # of & and ~: fifty take ten seconds and 650 MB


def prepare_lark(grammar: str) -> str:
    """The grammar, its embedded schemas with our whitespace. Raises ValueError."""
    pieces, at = [], 0
    for found in re.finditer(r"%json\s*", grammar):
        if found.start() < at:  # written in the schema before
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema behind %json is no JSON: {error}") from None
        pieces += [grammar[at : found.start()], f"%json {prepare_schema(schema)}"]
        at = end
    pieces.append(grammar[at:])
    _check_rules("".join(pieces[::2]))
    return "".join(pieces)


def _check_rules(rules: str) -> None:
    if "%llguidance" in rules:
        raise ValueError("%llguidance: options cannot be given")
    if rules.count("\n") >= _MAX_LINES:
        raise ValueError(f"the grammar has more than {_MAX_LINES} lines")
    bare = re.sub(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/', "", rules)
    if sum(map(bare.count, "&~")) > _MAX_OPERATORS:
        raise ValueError(f"the grammar has more than {_MAX_OPERATORS} of & and ~")
