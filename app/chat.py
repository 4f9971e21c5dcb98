"""A conversation as token ids, by the model's chat template.

What users write never becomes a control token: the template runs on text in which none can form,
and only control tokens that it has written itself are encoded as such.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError

from .control import Change, changed, strings
from .errors import InvalidRequest
from .template import ROLES, Message, TemplateFacts, adapt, probe
from .text import TextCodec
from .tools import NAME, ToolFormat

Tools = list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation with the opening of the answer, as a person reads it and as the model does."""

    text: str
    token_ids: list[int]


class ChatTemplate:
    """The chat template of one model folder; there may be none."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        source = codec.template
        self._facts: TemplateFacts | None = None
        if source is not None:
            self._facts = probe(
                codec.apply_template, source, lambda text: codec.control_id(text) is not None
            )
        self._check_shape = lru_cache(maxsize=128)(self._find_dropped)

    @property
    def roles(self) -> tuple[str, ...]:
        """Those that the template writes out."""
        return self._facts.roles if self._facts else ()

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model is taught to write calls; None if that is not known."""
        return self._facts.format if self._facts else None

    @cached_property
    def marker_ids(self) -> dict[str, int]:
        """The markers of calls that are special tokens, which are no text unless shown."""
        markers = (self.tool_format.begin, self.tool_format.end) if self.tool_format else ()
        ids = {marker: self._codec.control_id(marker) for marker in markers}
        return {marker: id_ for marker, id_ in ids.items() if id_ is not None}

    def describe(self) -> dict[str, Any]:
        """For /info."""
        facts = self._facts
        return {
            "chat_roles": list(self.roles),
            "tool_format": facts.format.name if facts and facts.format else None,
            "tools_shown_by": facts.tools if facts else None,
        }

    def render(self, messages: list[Message], tools: Tools = None) -> Rendered:
        """OpenAI's messages, with text or null as content; `tools` as `Tool.shown` gives them.

        Raises InvalidRequest if there is no template, if it refuses the conversation, or would
        leave a message out.
        """
        facts = self._facts
        if facts is None:
            raise InvalidRequest("messages: this model has no chat template", param="messages")
        if tools and facts.format is None:
            raise InvalidRequest(
                "tools: the model's chat template writes calls in a format that is not known here",
                param="tools",
            )
        try:
            checked = [self._checked(message, i) for i, message in enumerate(messages)]
            return self._render(_with_names(checked), tools, facts)
        except RecursionError:
            raise InvalidRequest("messages: nested too deeply", param="messages") from None

    def _render(self, messages: list[Message], tools: Tools, facts: TemplateFacts) -> Rendered:
        def write(change: Change) -> str:
            return self._apply(*adapt(*_changed(messages, tools, change), facts))

        plain = write(str)
        shape = tuple((m["role"], bool(m["content"]), "tool_calls" in m) for m in messages)
        dropped = self._check_shape(shape)
        if dropped is not None:
            role = messages[dropped]["role"]
            raise _wrong(dropped, "role", f"the model's chat template leaves out {role!r} here")
        stand_ins = self._codec.control.stand_ins([plain, *strings([messages, tools])])
        text = write(stand_ins.full)
        if stand_ins.restore(text) != plain:
            # The template looks into what users write. It may see all but control tokens, if that
            # makes no other control tokens appear.
            minimal = write(stand_ins.minimal)
            if self._codec.control_ids(minimal) == self._codec.control_ids(text):
                text = minimal
        ids = self._codec.encode_rendered(text, stand_ins.restore)
        return Rendered(stand_ins.restore(text), ids)

    def _apply(self, messages: list[Message], tools: Tools) -> str:
        try:
            return self._codec.apply_template(messages, tools)
        except RecursionError:
            raise
        except TemplateError as error:  # raise_exception, in the template's words
            why = f"the model's chat template refuses them: {error}"
        except Exception as error:  # a program with errors of its own
            why = f"the model's chat template fails on them ({type(error).__name__}: {error})"
        raise InvalidRequest(f"messages: {why}", param="messages") from None

    def _find_dropped(self, shape: tuple[tuple[str, bool, bool], ...]) -> int | None:
        """The first message that does not appear in what the template writes, by sentinels."""
        assert self._facts is not None
        names = [f"sentinel{i}of{len(shape)}" for i in range(len(shape))]
        messages: list[Message] = []
        for name, (role, has_content, has_calls) in zip(names, shape, strict=True):
            message: Message = {"role": role, "content": name if has_content else ""}
            if has_calls:
                function = {"name": name, "arguments": {}}
                call = {"id": "abcdefghi", "type": "function", "function": function}
                message["tool_calls"] = [call]
            if role == "tool":
                message |= {"tool_call_id": "abcdefghi", "name": name}
            messages.append(message)
        text = self._apply(*adapt(messages, None, self._facts))
        lost = (
            i
            for i, (_, has_content, has_calls) in enumerate(shape)
            if (has_content or has_calls) and names[i] not in text
        )
        return next(lost, None)

    # --- messages as OpenAI sends them -----------------------------------------------------------

    def _checked(self, message: Message, i: int) -> Message:
        role, content = message.get("role"), message.get("content")
        if role not in self._accepted:
            known = ", ".join(self._accepted)
            raise _wrong(i, "role", f"{role!r} is none of the roles that this model takes: {known}")
        calls = message.get("tool_calls") or None
        if calls is not None and role != "assistant":
            raise _wrong(i, "tool_calls", "only an assistant's message can have them")
        if content is None and calls is None:
            raise _wrong(i, "content", "is required; only a message with tool_calls can omit it")
        if not isinstance(content, str | None):
            raise _wrong(i, "content", "must be a string")
        checked: Message = {"role": role, "content": content or ""}
        if message.get("name") is not None:
            checked["name"] = _text(message["name"], i, "name")
        if calls is not None:
            checked["tool_calls"] = [_call(call, i, k) for k, call in enumerate(calls)]
        if role == "tool":
            checked["tool_call_id"] = _text(message.get("tool_call_id"), i, "tool_call_id")
        return checked

    @cached_property
    def _accepted(self) -> list[str]:
        """What `adapt` makes of them counts."""
        accepted = set(self.roles)
        if "system" in accepted:
            accepted.add("developer")
        if "user" in accepted:
            accepted.add("tool")
        return [role for role in ROLES if role in accepted]


def _changed(messages: list[Message], tools: Tools, change: Change) -> tuple[list[Message], Tools]:
    """With `change` made to all that users write; roles and the fields' names are not theirs."""
    new = [
        {k: v if k == "role" else changed(v, change) for k, v in message.items()}
        for message in messages
    ]
    return new, changed(tools, change)


def _call(call: Any, i: int, k: int) -> dict[str, Any]:
    """With the arguments as an object, which is what templates expect."""
    at = f"tool_calls[{k}]"
    match call:
        case {"id": str(id_), "function": {"name": str(name), "arguments": str(arguments)}}:
            pass
        case _:
            raise _wrong(i, at, "must have an id and a function with a name and arguments")
    if not NAME.fullmatch(name):
        raise _wrong(i, f"{at}.function.name", "must be 1 to 64 of A-Z a-z 0-9 _ -")
    try:
        parsed = _ARGUMENTS.decode(arguments) if arguments.strip() else {}
        "".join(strings(parsed)).encode()  # an escape may be half a character
    except ValueError as error:
        raise _wrong(i, f"{at}.function.arguments", f"no valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise _wrong(i, f"{at}.function.arguments", "must be a JSON object, as a string")
    function = {"name": name, "arguments": parsed}
    return {"id": id_, "type": "function", "function": function}


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(written: str) -> float:
    number = float(written)
    if math.isinf(number):
        raise ValueError(f"{written:.40} is too large a number")
    return number


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"the key {twice!r:.40} comes twice")
    return members


_ARGUMENTS = json.JSONDecoder(
    parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_members
)


def _with_names(messages: list[Message]) -> list[Message]:
    """Results of calls with the name of what was called, which some templates write."""
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    return [
        {"name": names[m["tool_call_id"]], **m} if m.get("tool_call_id") in names else m
        for m in messages
    ]


def _text(value: Any, i: int, field: str) -> str:
    if not isinstance(value, str):
        raise _wrong(i, field, "must be a string")
    return value


def _wrong(i: int, field: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"messages[{i}].{field}: {why}", param=f"messages[{i}].{field}")
