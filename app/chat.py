"""A conversation as token ids, by the model's chat template.

What users write never becomes a control token: the template runs on text in which none can form,
and only control tokens that it has written itself are encoded as such.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError

from .control import Change, changed, strings
from .errors import InvalidRequest
from .template import ROLES, Message, TemplateFacts, adapt, probe
from .text import TextCodec
from .tools import ToolFormat

Tools = list[dict[str, Any]] | None
Shape = tuple[tuple[str, bool, bool], ...]  # of each message: role, has content, has calls

_CACHED_MESSAGES = 64  # longer conversations are checked anew: a cache of theirs would be large


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
        """Messages as `for_template` of validated ones gives them, `tools` as `Tool.shown` does.

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
            prepared = [self._prepared(message, i) for i, message in enumerate(messages)]
            return self._render(_with_names(prepared), tools, facts)
        except RecursionError:
            raise InvalidRequest("messages: nested too deeply", param="messages") from None

    def _render(self, messages: list[Message], tools: Tools, facts: TemplateFacts) -> Rendered:
        def write(change: Change) -> str:
            return self._apply(*adapt(*_changed(messages, tools, change), facts))

        plain = write(str)
        shape = tuple((m["role"], bool(m["content"]), "tool_calls" in m) for m in messages)
        is_short = len(shape) <= _CACHED_MESSAGES
        dropped = self._check_shape(shape) if is_short else self._find_dropped(shape)
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

    def _find_dropped(self, shape: Shape) -> int | None:
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
        found = set(re.findall(rf"sentinel[0-9]+of{len(shape)}", text))
        lost = (
            i
            for i, (_, has_content, has_calls) in enumerate(shape)
            if (has_content or has_calls) and names[i] not in found
        )
        return next(lost, None)

    def _prepared(self, message: Message, i: int) -> Message:
        role, calls = message["role"], message.get("tool_calls")
        if role not in self._accepted:
            known = ", ".join(self._accepted)
            raise _wrong(i, "role", f"{role!r} is none of the roles that this model takes: {known}")
        if calls is None:
            return message
        return message | {"tool_calls": [_call(call, i, k) for k, call in enumerate(calls)]}

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


def _call(call: dict[str, Any], i: int, k: int) -> dict[str, Any]:
    """With the arguments as an object, which is what templates expect."""
    at = f"tool_calls[{k}]"
    arguments: str = call["function"]["arguments"]
    try:
        parsed = _ARGUMENTS.decode(arguments) if arguments.strip() else {}
        "".join(strings(parsed)).encode()  # an escape may be half a character
    except ValueError as error:
        raise _wrong(i, f"{at}.function.arguments", f"no valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise _wrong(i, f"{at}.function.arguments", "must be a JSON object, as a string")
    return call | {"function": call["function"] | {"arguments": parsed}}


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


def _wrong(i: int, field: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"messages[{i}].{field}: {why}", param=f"messages[{i}].{field}")
