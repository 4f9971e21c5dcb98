"""Calls under the grammar: whatever a model prefers, a forced call is one, and fits its schema."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher

from app.call_json import ToolCall
from app.engine import Engine, Unobserved
from app.errors import InvalidRequest
from app.grammar import Grammars
from app.openai_requests import ChatRequest
from app.sequence import SamplingParams, Sequence
from app.tool_calls import ToolParser
from app.tool_grammar import ToolForm
from app.tools import ToolFormat, ToolUse

from .engines import noise_engine, run
from .tiny_chats import DEFAULT, Chat, chat

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


def asked(tools: list[dict[str, Any]], choice: Any, parallel: bool | None = None) -> ToolUse:
    fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    messages = [{"role": "user", "content": "?"}]
    use = ChatRequest.model_validate({"messages": messages} | fields).tool_use()
    assert use is not None
    return use


def use_of(choice: Any = "required", parallel: bool | None = None, strict: bool = False) -> ToolUse:
    return asked(tools(strict=strict), choice, parallel)


class Model:
    """Takes any token that the grammar allows, by chance."""

    def __init__(self, of: Chat) -> None:
        self.of = of
        assert of.template.tool_format is not None
        self.format: ToolFormat = of.template.tool_format
        self.eos: int = of.tokenizer.eos_token_id
        backend = of.tokenizer.backend_tokenizer
        self.grammars = Grammars(backend, of.codec.vocab_size, frozenset({self.eos}))

    def form(self, use: ToolUse) -> ToolForm:
        return ToolForm(use, self.format, self.of.template.marker_ids)

    def matcher(self, use: ToolUse) -> LLMatcher:
        return self.grammars.tools(self.form(use), "tools").constraint().matcher

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
    assert not model.form(use_of("auto")).is_held
    strict = use_of("auto", strict=True)
    assert model.form(strict).is_held
    for text in ("", "Hello {", "\n a", written(model, "weather")):
        assert model.ends(strict, text)
    assert not model.takes(strict, '{"a"')
    assert not model.takes(strict, written(model, "weather").replace("Rome", "Oslo"))


# --- with the engine ------------------------------------------------------------------------------


def answers(model: Model, use: ToolUse, count: int = 6, max_tokens: int = 1500) -> list[Sequence]:
    """Of a model that likes calls and ends; the calls' insides are chance."""
    form = model.form(use)
    grammar = model.grammars.tools(form, "tools")
    bias = {model.eos: 3.0}
    if (begin := model.of.tokenizer.convert_tokens_to_ids(model.format.begin)) is not None:
        bias[begin] = 6.0
    sequences = []
    for seed in range(count):
        params = SamplingParams(max_tokens, temperature=1.0, seed=seed, logit_bias=bias)
        sequences.append(Sequence(f"r{seed}", [seed, 1, 2], params, grammar.constraint()))
    engine = noise_engine(model.of.codec.vocab_size, [model.eos])
    for one in sequences:
        engine.submit(one)
    run(engine)
    return sequences


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_forced_answer_from_the_engine_is_calls_that_fit(
    model: Model, parallel: bool, strict: bool
) -> None:
    num_whole = 0
    for one in answers(model, use_of(parallel=parallel, strict=strict)):
        assert one.finish_reason in ("stop", "length"), one.error
        if one.finish_reason == "stop":
            calls = model.parsed(model.text(one.output_ids))
            assert calls if parallel else len(calls) == 1
            for call in calls:
                assert_fits(call)
            num_whole += 1
    assert num_whole > 2


@pytest.mark.parametrize("parallel", [False, True])
def test_free_answer_from_the_engine_has_no_half_call(model: Model, parallel: bool) -> None:
    use = use_of("auto", parallel)
    if not model.form(use).is_held:
        return
    num_calls = 0
    for one in answers(model, use):
        assert one.finish_reason in ("stop", "length"), one.error
        if one.finish_reason == "stop":
            parts = model.parsed(model.text(one.output_ids))
            calls = [part for part in parts if isinstance(part, ToolCall)]
            text = "".join(part for part in parts if isinstance(part, str))
            assert model.format.begin not in text or (not parallel and len(calls) == 1)
            for call in calls:
                assert_fits(call)
            num_calls += len(calls)
    # No token of its own, and chance does not spell it.
    assert num_calls > 0 or model.of is chat("chatml")


@pytest.mark.slow
def test_calls_of_the_default_model_fit_their_schemas() -> None:
    from app.kv_cache import KVCache
    from app.model import OnnxModel
    from app.scheduler import Scheduler

    model = Model(chat("default"))
    onnx = OnnxModel.load(DEFAULT, "cpu", num_threads=2)
    cache = KVCache(onnx.spec.kv, 8, 1024, onnx.device)
    engine = Engine(onnx, cache, Scheduler(8, 1024, 64, frozenset([model.eos])), Unobserved())
    use = use_of(parallel=False)
    shown = [tool.shown() for tool in use.tools]
    question = [{"role": "user", "content": "How is the weather in Rome?"}]
    prompt = model.of.template.render(question, shown).token_ids
    grammar = model.grammars.tools(model.form(use), "tools")
    sequences = [
        Sequence(
            f"r{seed}",
            list(prompt),
            SamplingParams(200, temperature=1.0, seed=seed),
            grammar.constraint(),
        )
        for seed in range(4)
    ]
    for one in sequences:
        engine.submit(one)
    run(engine)
    assert {one.finish_reason for one in sequences} == {"stop"}
    for one in sequences:
        [call] = model.parsed(model.text(one.output_ids))
        assert_fits(call)


# --- what of a schema is kept ---------------------------------------------------------------------


def one_tool(parameters: dict[str, Any], strict: bool = False, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def forced(*tools: dict[str, Any]) -> ToolUse:
    return asked([*tools], "required")


def call_text(model: Model, arguments: dict[str, Any], name: str = "f") -> str:
    return model.format.text([{"function": {"name": name, "arguments": arguments}}])


A, B = {"type": "object", "properties": {"a": {"const": 1}}}, {"const": 1}
# schema -> arguments that are still refused; all of them permit {"a": 1}
LOOSE: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "options": (A | {"x-guidance": {"whitespace_flexible": True}}, {"a": 2}),
    "keyword": ({"properties": {"a": {"const": 1, "x-order": 3}}}, {"a": 2}),
    "unique": (A | {"uniqueItems": True}, {"b": 1}),
    "nullable": ({"properties": {"a": {"type": "integer", "nullable": True}}}, {"a": "x"}),
    "format": (
        {"properties": {"a": {"const": 1}, "b": {"type": "string", "format": "path"}}},
        {"b": 2},
    ),
    "look-ahead": (
        {"properties": {"a": {"const": 1}, "b": {"type": "string", "pattern": "(?=a)"}}},
        {"b": 2},
    ),
    "overlap": (
        {"properties": {"a": {"oneOf": [{"type": "integer"}, {"minimum": 0}]}}, "required": ["a"]},
        {},
    ),
    "condition": (A | {"if": {}, "then": {"properties": {"b": {}}}}, {"a": 2}),
    "type": ({"properties": {"a": {"type": "int"}}}, None),
    "remote": ({"properties": {"a": {"$ref": "https://example.org/a"}}}, None),
    "contradiction": ({"required": ["a"], "additionalProperties": False}, None),
}


@pytest.mark.parametrize("case", LOOSE)
def test_what_cannot_be_kept_of_a_schema_is_left_out(case: str) -> None:
    schema, refused = LOOSE[case]
    model = Model(chat("chatml"))
    use = forced(one_tool(schema))
    assert model.ends(use, call_text(model, {"a": 1}))
    assert refused is None or not model.takes(use, call_text(model, refused))


def test_properties_that_a_left_out_condition_tells_of_are_permitted() -> None:
    model = Model(chat("chatml"))
    use = forced(one_tool(LOOSE["condition"][0]))
    assert model.ends(use, call_text(model, {"a": 1, "b": 2}))


@pytest.mark.parametrize("case", LOOSE)
def test_strict_tool_whose_schema_cannot_be_kept_is_refused_by_name(case: str) -> None:
    model = Model(chat("chatml"))
    use = forced(one_tool(A, name="g"), one_tool(LOOSE[case][0], strict=True))
    with pytest.raises(InvalidRequest) as refused:
        model.matcher(use)
    assert refused.value.param == "tools[1].function.parameters"
    assert refused.value.message.startswith("tools[1].function.parameters: ")


def test_loose_tool_beside_a_strict_one_loosens_nothing_of_it() -> None:
    model = Model(chat("chatml"))
    use = forced(one_tool(A, strict=True), one_tool(LOOSE["type"][0], name="g"))
    assert model.ends(use, call_text(model, {"a": "x"}, "g"))
    assert model.ends(use, call_text(model, {"a": 1}))
    assert not model.takes(use, call_text(model, {"a": 2}))


def nested(depth: int) -> dict[str, Any]:
    return {"properties": {"a": nested(depth - 1)}} if depth else {}


def long(number: int) -> dict[str, Any]:
    return {"properties": {"a": {"enum": [f"{i:05}" for i in range(number)]}}}


@pytest.mark.parametrize("strict", [False, True])
def test_schemas_that_are_too_large_are_refused_by_name(strict: bool) -> None:
    model = Model(chat("chatml"))
    for schema, limit in ((nested(40), "60 levels"), (long(4000), "32768")):
        with pytest.raises(InvalidRequest, match=limit) as refused:
            model.matcher(forced(one_tool(A, name="g"), one_tool(schema, strict)))
        assert refused.value.param == "tools[1].function.parameters"
    with pytest.raises(InvalidRequest, match="131072") as refused:
        model.matcher(forced(*(one_tool(long(3000), strict, f"f{i}") for i in range(6))))
    assert refused.value.param == "tools"


def test_grammar_of_many_tools_is_made_quickly() -> None:
    model = Model(chat("chatml"))
    schema = {"properties": {f"p{i}": {"type": "string", "maxLength": 30} for i in range(20)}}
    use = forced(*(one_tool(schema, name=f"f{i}") for i in range(100)))
    started_at = time.process_time()
    matcher = model.matcher(use)
    assert time.process_time() - started_at < 5
    assert not matcher.is_error()


def test_schemas_that_only_together_cost_too_much_are_opened_but_for_strict_ones() -> None:
    model = Model(chat("chatml"))
    wide = {"properties": {f"p{i}": {"maxLength": 30} for i in range(900)}}
    loose = [one_tool(wide, name=f"f{i}") for i in range(4)]
    use = forced(*loose, one_tool(A, strict=True, name="g"))
    assert model.ends(use, call_text(model, {"x": 1}, "f0"))
    assert not model.takes(use, call_text(model, {"a": 2}, "g"))
