"""What of patterns and formats in JSON schemas an answer can be held to.

llguidance looks whether the patterns of one value have anything in common, in a time that doubles
with each of them; so few may meet. Its formats permit some texts that validators refuse (a leap
second at noon); these are replaced by patterns. Pure: dicts in, dicts out.
"""

from __future__ import annotations

import re
from typing import Any

MAX_MEETING = 3
_MAX_PATTERN_PROPERTIES = 8  # of a schema; each is compared with each
_MAX_ROUNDS = 20
_REF = re.compile(r"#(/(\$defs|definitions)/[^/%]+)?")

_LEAP_YEAR = (
    "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"  # from 1000 on
)
_DATE = (
    f"(?:{_LEAP_YEAR}-02-29|[1-9][0-9]{{3}}-(?:02-(?:0[1-9]|1[0-9]|2[0-8])|"
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])))"
)
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,14}"
_HOST = f"{_LABEL}(?:\\.{_LABEL}){{0,5}}\\.[A-Za-z]{{2,15}}"  # at most 190 characters
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_{|}~-]{1,20}"
_CHAR = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": f"(?:{_HOST}|{_LABEL})",
    "email": f"{_ATOM}(?:\\.{_ATOM}){{0,2}}@{_HOST}",
    "uri": (
        f"(?:(?:https?|ftp|wss?)://{_HOST}(?::[0-9]{{1,4}})?(?:/{_CHAR}*)*|(?:urn|mailto):{_CHAR}+)"
        f"(?:\\?(?:{_CHAR}|[/?])*)?(?:#(?:{_CHAR}|[/?])*)?"
    ),
}
FORMATS = {*_PATTERNS, "duration", "ipv4", "ipv6", "uuid"}  # the others: llguidance's own


def check_pattern(pattern: Any) -> None:
    """Raises ValueError for character classes that regex dialects read differently."""
    if not isinstance(pattern, str):
        raise ValueError("a pattern must be a string")
    bare = re.sub(r"(?s)\\.", "\\\\", pattern)
    for found in re.finditer(r"\[\^?\]?([^\]]*)", bare):
        if other := next((text for text in ("[", "&&", "--", "~~") if text in found[1]), None):
            raise ValueError(f"pattern: {other} inside [...] is not supported")


def check_meeting(root: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """Raises ValueError where too many patterns could hold for one value; `parts` are `root` and
    all schemas in it."""
    number = sum(len(part.get("patternProperties", ())) for part in parts)
    if number > _MAX_PATTERN_PROPERTIES:
        raise ValueError(
            f"the schema has {number} patternProperties, at most {_MAX_PATTERN_PROPERTIES} can be"
        )
    targets = {}
    for ref in [part["$ref"] for part in parts if "$ref" in part]:
        if not isinstance(ref, str) or not _REF.fullmatch(ref):
            raise ValueError(f"$ref: {ref!r}: only '#', '#/$defs/NAME' and '#/definitions/NAME'")
        targets[ref] = _target(root, ref)
    meeting = dict.fromkeys(targets, (0, 0))
    # Schemas may refer to each other, even in circles: until nothing is new.
    for _ in range(_MAX_ROUNDS):
        before = dict(meeting)
        for ref in reversed(targets):
            meeting[ref] = _meeting(targets[ref], meeting)
        if (most := max(map(max, [*meeting.values(), _meeting(root, meeting)]))) > MAX_MEETING:
            raise ValueError(
                f"{most} patterns and formats or more may hold for one value (allOf, $ref, anyOf), "
                f"at most {MAX_MEETING} can"
            )
        if meeting == before:
            return
    raise ValueError("schemas with patterns refer to each other in too many ways")


def with_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema, its format written as a pattern where llguidance's is too wide."""
    pattern = _PATTERNS.get(str(schema.get("format")))
    if pattern is None:
        return schema
    kept = {key: value for key, value in schema.items() if key != "format"}
    if "pattern" not in kept:
        return kept | {"pattern": f"^{pattern}$"}
    return kept | {"allOf": [*kept.get("allOf", ()), {"pattern": f"^{pattern}$"}]}


def _target(root: dict[str, Any], ref: str) -> Any:
    node: Any = root
    for name in ref.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or name not in node:
            raise ValueError(f"$ref: there is no {ref!r}")
        node = node[name]
    return node


def _meeting(schema: Any, refs: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """How many patterns may hold for a value of `schema`, and for one inside it: at most."""
    if not isinstance(schema, dict):
        return 0, 0

    def inner(key: str) -> list[tuple[int, int]]:
        value = schema.get(key, ())
        if isinstance(value, dict) and key in ("properties", "patternProperties"):
            value = list(value.values())
        return [_meeting(part, refs) for part in (value if isinstance(value, list) else [value])]

    children = ("properties", "items", "prefixItems", "additionalProperties", "additionalItems")
    inside = max(max(pair) for key in children for pair in [(0, 0), *inner(key)])
    inside += sum(max(pair) for pair in inner("patternProperties"))  # may meet with one another
    here = ("pattern" in schema) + ("format" in schema)
    together = inner("allOf")
    if "$ref" in schema:
        together.append(refs[schema["$ref"]])
    for key in ("anyOf", "oneOf"):  # one of them
        options = [(0, 0), *inner(key)]
        together.append((max(h for h, _ in options), max(i for _, i in options)))
    return here + sum(h for h, _ in together), inside + sum(i for _, i in together)
