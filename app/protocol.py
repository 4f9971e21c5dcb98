"""From the bytes of a body to a validated request, or an error that names the field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from .errors import InvalidRequest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

M = TypeVar("M", bound=BaseModel)

_MAX_DEPTH = 100  # MAX_JSON_DEPTH's default
_MAX_MEMBERS = 4096  # of one object: pydantic has an error for each that it does not know
# Characters of what a client wrote that an error repeats.
_MAX_NAME = 100
_MAX_MESSAGE = 500


def parse(model: type[M], body: bytes, max_depth: int = _MAX_DEPTH) -> M:
    """Raises InvalidRequest naming the field, what is wrong with it and what it may be."""
    return validate(model, read_object(body, max_depth))


def read_object(body: bytes, max_depth: int = _MAX_DEPTH) -> dict[str, Any]:
    """A JSON object that is neither too deep nor too wide. Raises InvalidRequest."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body must be a JSON object")
    if body.count(b"{") + body.count(b"[") > max_depth and _is_deeper(parsed, max_depth):
        raise InvalidRequest(
            f"the body has objects or arrays more than {max_depth} deep (MAX_JSON_DEPTH)"
        )
    if body.count(b":") > _MAX_MEMBERS:
        _check_width(parsed)
    return parsed


def validate(model: type[M], parsed: dict[str, Any]) -> M:
    """Raises InvalidRequest as `parse` does."""
    try:
        return model.model_validate(parsed)
    except ValidationError as error:
        raise _invalid(model, parsed, error) from None


def _is_deeper(parsed: Any, depth: int) -> bool:
    """Than so many objects and arrays within each other. Not by recursion, which has a bottom."""
    level = [parsed]
    for _ in range(depth):
        inner = [each for outer in level for each in _values(outer)]
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _check_width(parsed: dict[str, Any]) -> None:
    if len(parsed) > _MAX_MEMBERS:
        raise InvalidRequest(f"the body has more than {_MAX_MEMBERS} members")
    for name, value in parsed.items():
        if _is_wider(value, _MAX_MEMBERS):
            name = name[:_MAX_NAME]
            raise InvalidRequest(f"{name}: more than {_MAX_MEMBERS} members", param=name)


def _is_wider(value: Any, width: int) -> bool:
    """Has it, or an object in it, more than so many members?"""
    left = [value] if isinstance(value, dict | list) else []
    while left:
        value = left.pop()
        if isinstance(value, dict) and len(value) > width:
            return True
        left += [each for each in _values(value) if isinstance(each, dict | list)]
    return False


def _values(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _invalid(
    model: type[BaseModel], body: dict[str, Any], error: ValidationError
) -> InvalidRequest:
    errors = error.errors(include_url=False)
    # Of a union each member complains: the one that got furthest is what the client meant, and of
    # those the one that was nearest to the kind of value that it wants.
    same = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    first = max(same, key=lambda each: (len(_steps(body, each["loc"])), _nearness(each)))
    path = _written(_path(body, first))
    top = _written(list(first["loc"][:1]))
    message = str(first["msg"]).removeprefix("Value error, ")[:_MAX_MESSAGE]
    if first["type"] == "extra_forbidden":
        known = f" of this route; it knows {', '.join(_names(model))}" if path == top else ""
        return InvalidRequest(f"{path}: not a field{known}", param=path)
    if first["type"] in ("missing", "union_tag_not_found"):
        return InvalidRequest(f"{path}: is required", param=path)
    fields = dict(zip(_names(model), model.model_fields.values(), strict=True))
    described = fields.get(str(first["loc"][0])) if first["loc"] else None
    if described is None:  # a rule about several fields names them itself
        return InvalidRequest(message, param=message.partition(":")[0])
    subject = "it" if path == top else top
    limits = f"{subject} must be {described.description}"
    return InvalidRequest(f"{path}: {message}; {limits}", param=path)


def _names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _nearness(error: ErrorDetails) -> int:
    if error["type"].endswith("_type") or error["type"] == "extra_forbidden":
        return 0
    return 1 if error["type"] == "literal_error" else 2


def _path(body: Any, error: ErrorDetails) -> list[int | str]:
    """The way to what is wrong, a name that is missing or should not be there included."""
    loc = error["loc"]
    if error["type"] in ("missing", "extra_forbidden"):
        return [*_steps(body, loc[:-1]), loc[-1]]
    if error["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return [*_steps(body, loc), error["ctx"]["discriminator"].strip("'")]
    return _steps(body, loc)


def _steps(body: Any, loc: tuple[int | str, ...]) -> list[int | str]:
    """The way through the body to what is wrong, without pydantic's names of union members."""
    steps: list[int | str] = []
    for step in loc:
        if _is_in(body, step):
            body = body[step]
            steps.append(step)
    return steps


def _is_in(value: Any, step: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(step, int) and step < len(value)
    return isinstance(value, dict) and step in value


def _written(steps: list[int | str]) -> str:
    """As OpenAI's errors do: `messages[0].role`."""
    path = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step:.{_MAX_NAME}}" for step in steps
    )
    return path.removeprefix(".")
