"""Calls under the grammar: whatever a model prefers, a forced call is one, and fits its schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from app.text import token_bytes
from app.tool_calls import ToolCall, ToolParser
from app.tool_grammar import tool_grammar
from app.tools import HERMES, ToolFormat, ToolUse, parse_tool_use

from .tiny_chats import Chat, chat

MODELS = ["qwen", "phi4", "mistral", "llama31", "chatml"]
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "caf\u00e9", 'a "b" \\ </tool_call>']},
        "days": {"$ref": "#/$defs/days"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TREE = {
    "type": "object",
    "properties": {"$ref": {"const": "#/x"}, "enum": {"$ref": "#/definitions/leaf"}},
    "required": ["$ref", "enum"],
    "additionalProperties": False,
    "definitions": {"leaf": {"enum": [{"$ref": "#"}, None]}},
}
SCHEMAS = {"weather": CITY, "tree": TREE, "clock": None}
every = pytest.mark.parametrize("name", MODELS)


def tools(*, strict: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


def use_of(choice: Any = "required", parallel: bool | None = None, strict: bool = False) -> ToolUse:
    use = parse_tool_use(tools(strict=strict), choice, parallel)
    assert use is not None
    return use


class Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, of: Chat) -> None:
        backend = of.tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        self.eos_token_id, self.bos_token_id = of.tokenizer.eos_token_id, None
        self.special_token_ids = [id_ for id_, token in added.items() if token.special]
        self.tokens = token_bytes(backend)
        for id_ in self.special_token_ids:
            self.tokens[id_] = added[id_].content.encode()
        self._ids = {token: id_ for id_, token in enumerate(self.tokens)}

    def __call__(self, text: bytes) -> list[int]:
        """Byte by byte: with nothing in front, as SentencePiece's tokenizers would put there."""
        return [self._ids[bytes([byte])] for byte in text]


class Model:
    """Takes any token that the grammar allows, by chance."""

    def __init__(self, of: Chat) -> None:
        self.of = of
        assert of.template.tool_format is not None
        self.format: ToolFormat = of.template.tool_format
        self.eos: int = of.tokenizer.eos_token_id
        self.tokenizer = LLTokenizer(TokenizerWrapper(Tokens(of)))

    def matcher(self, use: ToolUse) -> LLMatcher:
        grammar = tool_grammar(use, self.format, self.of.template.marker_ids)
        assert grammar is not None
        matcher = LLMatcher(self.tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def answer(self, use: ToolUse, seed: int, max_tokens: int = 2000) -> str:
        matcher, chance, ids = self.matcher(use), random.Random(seed), []
        while not matcher.is_stopped():
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            id_ = self.eos if matcher.is_accepting() else int(chance.choice(allowed))
            assert matcher.consume_token(id_), matcher.get_error()
            ids.append(id_)
            assert len(ids) < max_tokens
        return self.text(ids)

    def text(self, ids: list[int]) -> str:
        """As the server reads them; the end token is no text."""
        shown = self.of.codec.detokenizer(self.of.template.marker_ids.values())
        return shown.feed([id_ for id_ in ids if id_ != self.eos], is_last=True)

    def parsed(self, text: str) -> list[str | ToolCall]:
        parser = ToolParser(self.format, SCHEMAS)
        return [*parser.feed(text), *parser.flush()]

    def takes(self, use: ToolUse, text: str) -> bool:
        """Whether the grammar allows the beginning `text`."""
        ids = self.of.codec.encode(text, parse_special=True)
        return bool(self.matcher(use).try_consume_tokens(ids) == len(ids))

    def ends(self, use: ToolUse, text: str) -> bool:
        """Whether an answer may end behind `text`."""
        ids = self.of.codec.encode(text, parse_special=True)
        matcher = self.matcher(use)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(chat(request.param))


def written(model: Model, *names: str) -> str:
    arguments = {"weather": {"city": "Rome", "days": 3}, "clock": {}}
    calls = [{"function": {"name": name, "arguments": arguments[name]}} for name in names]
    return model.format.text(calls)


def assert_fits(call: str | ToolCall) -> None:
    assert isinstance(call, ToolCall), call
    arguments = json.loads(call.arguments)
    jsonschema_rs.validate(SCHEMAS[call.name] or {"maxProperties": 0}, arguments)


@pytest.mark.parametrize("strict", [False, True])
def test_forced_call_is_one_and_fits_its_schema(model: Model, strict: bool) -> None:
    names = set()
    for seed in range(12):
        [call] = model.parsed(model.answer(use_of(parallel=False, strict=strict), seed))
        assert_fits(call)
        names.add(call.name)
    assert len(names) > 1


def test_each_of_several_forced_calls_fits_its_schema(model: Model) -> None:
    for seed in range(6):
        for call in model.parsed(model.answer(use_of(), seed)):
            assert_fits(call)


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_named_function_is_called(model: Model, name: str) -> None:
    use = use_of({"type": "function", "function": {"name": name}})
    for seed in range(3):
        [call] = model.parsed(model.answer(use, seed))
        assert_fits(call)
        assert call.name == name


def test_forced_answer_cannot_be_text_nor_end_without_a_call(model: Model) -> None:
    assert not model.takes(use_of(), "Hello")
    assert not model.ends(use_of(), "")


def test_call_as_templates_write_it_is_taken(model: Model) -> None:
    text = written(model, "weather")
    assert model.ends(use_of(), text)
    assert not model.takes(use_of(), text.replace("Rome", "Oslo"))
    assert not model.takes(use_of(), text.replace("days", "day"))


def test_several_calls_only_if_they_may_be_parallel(model: Model) -> None:
    text = written(model, "weather", "clock")
    can_repeat = model.format.name != "llama"
    for choice in ("required", "auto"):
        if choice == "auto" and not can_repeat:
            continue
        assert model.ends(use_of(choice), text) is can_repeat
        assert not model.ends(use_of(choice, parallel=False), text)
        assert model.ends(use_of(choice, parallel=False), written(model, "weather"))


# --- tool_choice "auto" ---------------------------------------------------------------------------

FREE = ["", "Hello", "a < b [1] {", "</tool_call>", "<tool_cal", "\U0001f642\n\n", "TOOL_CALLS"]


@pytest.mark.parametrize("text", FREE)
def test_free_text_is_not_cut(model: Model, text: str) -> None:
    if model.format.begin:
        assert model.ends(use_of("auto"), text)


def test_call_may_follow_free_text(model: Model) -> None:
    if model.format.begin:
        assert model.ends(use_of("auto"), "I look.\n" + written(model, "weather"))
        assert not model.ends(use_of("auto"), "I look.\n" + written(model, "weather")[:-6])


def test_call_that_has_begun_is_held_to_the_schemas(model: Model) -> None:
    if not model.format.begin:
        return
    text = f"so {written(model, 'weather')}"
    assert not model.takes(use_of("auto"), f"so {model.format.begin} hm")
    assert not model.takes(use_of("auto"), text.replace("weather", "whether"))
    assert not model.takes(use_of("auto"), text.replace("Rome", "Oslo"))
    assert not model.ends(use_of("auto"), f"so {model.format.begin}")


def test_format_without_a_marker_is_held_only_for_strict_tools() -> None:
    model = Model(chat("llama31"))
    assert tool_grammar(use_of("auto"), model.format, {}) is None
    strict = use_of("auto", strict=True)
    for text in ("", "Hello {", "\n a", written(model, "weather")):
        assert model.ends(strict, text)
    assert not model.takes(strict, '{"a"')
    assert not model.takes(strict, written(model, "weather").replace("Rome", "Oslo"))


def test_schemas_own_options_do_not_reach_the_grammar() -> None:
    function = {
        "name": "f",
        "parameters": {"type": "object", "x-guidance": {"whitespace_flexible": True}},
    }
    use = parse_tool_use([{"type": "function", "function": function}], "required")
    assert use is not None
    text = tool_grammar(use, HERMES, {})
    assert text is not None
    assert text.count("x-guidance") == 1


def test_schema_that_cannot_be_kept_is_told_for_a_strict_tool() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (False, True):
        function = {"name": "f", "parameters": schema, "strict": strict}
        use = parse_tool_use([{"type": "function", "function": function}], "required")
        assert use is not None
        grammar = tool_grammar(use, HERMES, {})
        assert LLMatcher(Model(chat("chatml")).tokenizer, grammar or "").is_error() is strict
