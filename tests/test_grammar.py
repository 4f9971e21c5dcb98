"""Answers held to a grammar. The models say anything: what comes out is the grammar's doing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.detokenizer import token_bytes
from app.engine import Engine, Unobserved
from app.errors import InvalidRequest, UnservableModel
from app.grammar import Grammar, Grammars
from app.kv_cache import KVCache
from app.loading import _known_eos_ids, _make_grammars
from app.masks import GrammarConstraint, MaskWorker
from app.patterns import FORMATS
from app.scheduler import Scheduler
from app.sequence import FinishReason, SamplingParams, Sequence, StepPlan
from app.text import TextCodec

from .engines import NoiseModel, TokenCache, noise_engine, run
from .tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

VOCAB = 331
DEFAULT = Path(__file__).parents[1] / "models" / "default"
TOKENIZERS = {"bytes": byte_level_tokenizer(), "pieces": sentencepiece_tokenizer()}
EOS = {"bytes": frozenset({260, 262}), "pieces": frozenset({291, 295})}
GRAMMARS = {
    kind: Grammars(tokenizer.backend_tokenizer, VOCAB, EOS[kind])
    for kind, tokenizer in TOKENIZERS.items()
}


def sequence(
    grammar: Grammar | None, seed: int = 0, max_tokens: int = 400, **options: Any
) -> Sequence:
    constraint = grammar.constraint() if grammar is not None else None
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, **options)
    return Sequence(f"r{seed}", [seed + 1, 2, 3], params, constraint)


def generate(kind: str, grammar: Grammar | None, count: int = 4, **options: Any) -> list[Sequence]:
    engine = noise_engine(VOCAB, EOS[kind])
    sequences = [sequence(grammar, seed, **options) for seed in range(count)]
    for one in sequences:
        engine.submit(one)
    run(engine)
    return sequences


def text_of(kind: str, answer: Sequence) -> str:
    """Decoded strictly: half a character would raise."""
    table = token_bytes(TOKENIZERS[kind].backend_tokenizer)
    ids = [id_ for id_ in answer.output_ids if id_ not in answer.end_ids]
    return b"".join(table[id_] for id_ in ids).decode()


def check_schema(kind: str, schema: dict[str, Any], **options: Any) -> None:
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    num_stopped = 0
    for answer in generate(kind, GRAMMARS[kind].json_schema(schema, "x"), **options):
        if answer.finish_reason is FinishReason.STOP:
            num_stopped += 1
            validator.validate(json.loads(text_of(kind, answer)))
        else:
            assert answer.finish_reason is FinishReason.LENGTH, answer.error
    assert num_stopped > 0


# --- tokens ---------------------------------------------------------------------------------------


def metaspace_tokenizer() -> Tokenizer:
    description = json.loads(TOKENIZERS["pieces"].backend_tokenizer.to_str())
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    description |= {"normalizer": None, "pre_tokenizer": metaspace, "decoder": metaspace}
    return Tokenizer.from_str(json.dumps(description))


@pytest.mark.parametrize("kind", ["bytes", "pieces", "metaspace", "default"])
def test_tokens_stand_for_the_same_bytes_as_in_the_answers_text(kind: str) -> None:
    if kind == "default":
        tokenizer = AutoTokenizer.from_pretrained(DEFAULT).backend_tokenizer
    elif kind == "metaspace":
        tokenizer = metaspace_tokenizer()
    else:
        tokenizer = TOKENIZERS[kind].backend_tokenizer
    table = token_bytes(tokenizer)
    grammars = Grammars(tokenizer, len(table) + 40, frozenset({0}))
    # What is permitted of a text without limits: every token that starts a character.
    permitted = masks_of(grammars.regex("(?s:.*)", "x"))
    whole = {id_ for id_, text in enumerate(table) if text and is_text(text)}
    assert {*np.flatnonzero(permitted)} >= whole
    assert not permitted[len(table) :].any()
    # And of one text: whatever it begins with, in our spelling.
    permitted = masks_of(grammars.regex("(?s:the .*)", "x"))
    expected = {id_ for id_, text in enumerate(table) if text and begins(text, b"the ")}
    assert {*np.flatnonzero(permitted)} == expected


def begins(text: bytes, whole: bytes) -> bool:
    try:
        return whole.startswith(text) or (text.startswith(whole) and is_text(text))
    except UnicodeDecodeError:
        return False


def is_text(text: bytes) -> bool:
    try:
        return bool(text.decode())
    except UnicodeDecodeError:
        return False


def masks_of(grammar: Grammar, end_ids: frozenset[int] = frozenset()) -> NDArray[np.uint8]:
    worker = MaskWorker()
    one = sequence(grammar)
    one.end_ids = end_ids
    worker.start([sequence(None), one])
    masks = worker.collect()
    assert list(masks) == [1]
    return np.unpackbits(masks[1].view(np.uint8), bitorder="little")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_added_token_that_is_not_special_is_text(kind: str) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS[kind].backend_tokenizer.to_str())
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    think = tokenizer.token_to_id("<think>")
    grammars = Grammars(tokenizer, VOCAB, EOS[kind])
    assert masks_of(grammars.regex("(?s:.*)", "x"))[think]
    assert masks_of(grammars.lark('start: "<think>" "a"', "x"))[think]


def test_any_tokens_that_spell_what_must_follow_are_permitted() -> None:
    tokenizer = TOKENIZERS["bytes"].backend_tokenizer
    permitted = np.flatnonzero(masks_of(GRAMMARS["bytes"].regex("then", "x")))
    assert {tokenizer.id_to_token(id_) for id_ in permitted} == {"t", "th", "the"}


def test_end_tokens_that_the_graph_does_not_have_are_no_hindrance() -> None:
    tokenizer = TOKENIZERS["bytes"].backend_tokenizer
    grammar = Grammars(tokenizer, VOCAB, EOS["bytes"] | {VOCAB}).regex("(ab)*", "x")
    assert all(masks_of(grammar)[id_] for id_ in EOS["bytes"])


def test_tokenizer_without_an_end_token_is_refused() -> None:
    with pytest.raises(ValueError, match="eos"):
        Grammars(TOKENIZERS["bytes"].backend_tokenizer, VOCAB, frozenset({VOCAB}))


def test_model_whose_tokenizer_cannot_be_served_is_without_grammars(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = TOKENIZERS["bytes"]
    codec = TextCodec(tokenizer, EOS["bytes"])
    assert _make_grammars(codec, VOCAB, EOS["bytes"]) is not None
    assert _make_grammars(codec, VOCAB, frozenset({VOCAB})) is None
    assert "no structured output with this tokenizer" in caplog.text


def test_end_tokens_are_those_that_the_graph_has() -> None:
    codec = TextCodec(TOKENIZERS["bytes"], EOS["bytes"] | {VOCAB + 40})
    assert _known_eos_ids(codec, VOCAB) == EOS["bytes"]
    with pytest.raises(UnservableModel, match="no answer would end"):
        _known_eos_ids(TextCodec(TOKENIZERS["bytes"], frozenset({VOCAB})), VOCAB)


def test_end_token_beyond_the_masks_costs_no_row_its_answer() -> None:
    engine = noise_engine(VOCAB, EOS["bytes"] | {100 * VOCAB})
    rows = [sequence(GRAMMARS["bytes"].regex("[a-z]{5}", "x")), sequence(None, 1, 20)]
    for one in rows:
        engine.submit(one)
    run(engine)
    assert [one.error for one in rows] == [None, None]


def test_making_them_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    Grammars(TOKENIZERS["pieces"].backend_tokenizer, VOCAB, EOS["pieces"]).regex("a", "x")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_end_token_is_permitted_exactly_where_the_answer_may_end(kind: str) -> None:
    ends = EOS[kind] | {40}  # one of the request's own
    assert all(masks_of(GRAMMARS[kind].regex("(ab)*", "x"), ends)[id_] for id_ in ends)
    assert not any(masks_of(GRAMMARS[kind].regex("(ab)+|.c", "x"), ends)[id_] for id_ in ends)


# --- what comes out -------------------------------------------------------------------------------

SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": {"enum": ["red", "green", 3, None, {"a": [1]}]},
    "const": {"const": {"a": 'ü\n"\\', "b": []}},
    "integers": {"type": "integer", "minimum": -5, "exclusiveMaximum": 120},
    "numbers": {"type": "number", "minimum": 0.25, "maximum": 1.5},
    "nested": {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
            "c": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]},
        },
        "required": ["a", "c"],
        "additionalProperties": False,
    },
    "arrays": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    "tuples": {"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}], "items": False},
    "unicode": {"type": "string", "minLength": 3, "maxLength": 6},
    "patterns": {"type": "string", "pattern": "^[a-c]{2}-\\d+$"},
    "plain numbers": {"type": ["number", "null"]},
    "numbers from": {"type": "number", "exclusiveMinimum": 0},
    **{name: {"type": "string", "format": name} for name in sorted(FORMATS)},
    "format and pattern": {"type": "string", "format": "date", "pattern": "^2"},
    "one property": {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "minProperties": 1,
        "maxProperties": 1,
    },
    "multiples": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 7},
    "references": {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}},
        "$ref": "#/$defs/tree",
    },
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_finished_answer_validates(kind: str, name: str) -> None:
    check_schema(kind, SCHEMAS[name])


def takes(grammar: Grammar, text: str) -> bool:
    """Is the whole of `text` an answer?"""
    constraint = grammar.constraint()
    tokenizer = TOKENIZERS["bytes"].backend_tokenizer
    for id_ in tokenizer.encode(text, add_special_tokens=False).ids:
        constraint.accept(id_)
    return constraint.error is None and constraint.matcher.is_accepting()


def test_name_of_a_property_is_written_one_way() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = GRAMMARS["bytes"].json_schema(schema, "x")
    assert takes(grammar, r'{"a":1,"b":"\n\"\\\t"}')
    assert not takes(grammar, r'{"a":1,"\u0061":"x"}')


@pytest.mark.parametrize(
    ("format_", "valid", "invalid"),
    [
        ("time", "05:03:59Z", "05:03:60Z"),
        ("date-time", "2024-02-29T05:03:59.5+01:00", "2024-02-29T05:03:60Z"),
        ("date", "2024-02-29", "2023-02-29"),
        ("date", "2000-02-29", "1900-02-29"),
        ("hostname", "www.example.com", "a-.com"),
        ("hostname", "localhost", ".".join(["abcdefghijklmno"] * 17)),
        ("email", "jane.doe@example.com", "a@-b-.c"),
        ("uri", "https://example.com:8080/a/b?c=d#e", "http://[::z]"),
        ("uri", "mailto:a@b.com", "a:%zz"),
    ],
)
def test_format_takes_what_validators_take(format_: str, valid: str, invalid: str) -> None:
    schema = {"type": "string", "format": format_}
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    assert validator.is_valid(valid)
    grammar = GRAMMARS["bytes"].json_schema(schema, "x")
    assert takes(grammar, json.dumps(valid))
    assert not takes(grammar, json.dumps(invalid))


def test_number_has_no_exponent_that_could_make_it_infinite() -> None:
    grammar = GRAMMARS["bytes"].json_schema({"type": "number"}, "x")
    assert takes(grammar, "-12.5")
    assert not takes(grammar, "5e0719")


def writable(**sizes: int) -> st.SearchStrategy[str]:
    """Text without control characters that only an escape by number could write."""
    escapes = "\b\t\n\f\r"
    others = st.characters(min_codepoint=0x20, exclude_categories=["Cs"])
    return st.text(others | st.sampled_from(escapes), **sizes)


def small_schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
        st.just({"type": "boolean"}),
        st.lists(
            st.one_of(writable(max_size=4), st.integers(-(2**53), 2**53), st.none()),
            min_size=1,
            max_size=3,
        ).map(lambda values: {"enum": values}),
        st.tuples(st.integers(-20, 20), st.integers(0, 30)).map(
            lambda t: {"type": "integer", "minimum": t[0], "maximum": t[0] + t[1]}
        ),
        st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
            lambda t: {"type": "string", "minLength": t[0], "maxLength": t[0] + t[1]}
        ),
    )
    return st.recursive(leaves, grow, max_leaves=4)


def grow(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2})
    objects = st.dictionaries(writable(max_size=3), inner, min_size=1, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties))).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )
    return st.one_of(
        arrays, objects, st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts})
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(small_schemas())
def test_finished_answer_validates_whatever_the_schema(schema: dict[str, Any]) -> None:
    check_schema("pieces", schema)


def test_json_object_is_an_object() -> None:
    answers = generate(
        "bytes", GRAMMARS["bytes"].json_schema({"type": "object"}, "x"), count=16, max_tokens=200
    )
    whole = [a for a in answers if a.finish_reason is FinishReason.STOP]
    assert whole
    assert all(isinstance(json.loads(text_of("bytes", answer)), dict) for answer in whole)


def test_blanks_between_json_tokens_are_bounded() -> None:
    space = TOKENIZERS["bytes"].backend_tokenizer.token_to_id("Ġ")
    constraint = GRAMMARS["bytes"].json_schema({"type": "object"}, "x").constraint()
    for id_ in [TOKENIZERS["bytes"].backend_tokenizer.token_to_id("{"), space, space]:
        constraint.accept(id_)
    assert constraint.error is not None


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("regex", ["a{2,5}|[bc]+d", "(?s:.){3}", "[0-9]{4}-[a-f]", "é+ü?/x"])
def test_regex_matches_the_whole_answer(kind: str, regex: str) -> None:
    for answer in generate(kind, GRAMMARS[kind].regex(regex, "x")):
        assert answer.finish_reason is FinishReason.STOP, answer.error
        assert re.fullmatch(regex, text_of(kind, answer))


def test_lark_grammar_takes_schemas_and_control_tokens() -> None:
    lark = 'start: "x" <|im_start|> %json {"type": "integer", "maximum": 9, "minimum": 0} end\n'
    lark += 'end: "." | "!"'
    start = 261
    for answer in generate("bytes", GRAMMARS["bytes"].lark(lark, "x")):
        assert answer.output_ids[1] == start
        assert re.fullmatch(r"x\d[.!]", text_of("bytes", answer))
        assert answer.finish_reason is FinishReason.STOP


def test_answer_ends_at_once_when_nothing_can_follow() -> None:
    [answer] = generate("bytes", GRAMMARS["bytes"].regex("abc", "x"), count=1)
    assert len(text_of("bytes", answer)) == 3
    assert not EOS["bytes"] & {*answer.output_ids}


def test_running_out_of_tokens_says_length() -> None:
    [answer] = generate("bytes", GRAMMARS["bytes"].regex("a{50}", "x"), count=1, max_tokens=7)
    assert answer.finish_reason is FinishReason.LENGTH


# --- rows beside each other -----------------------------------------------------------------------


def test_rows_answer_together_as_alone() -> None:
    def make() -> list[Sequence]:
        choices = GRAMMARS["bytes"].json_schema(SCHEMAS["nested"], "x")
        grammars = [choices, None, GRAMMARS["bytes"].regex("[a-z]{20}", "x"), None, choices]
        return [sequence(grammar, seed, 30) for seed, grammar in enumerate(grammars)]

    alone = []
    for one in make():
        engine = noise_engine(VOCAB, EOS["bytes"])
        engine.submit(one)
        run(engine)
        alone.append(one.output_ids)
    together, engine = make(), noise_engine(VOCAB, EOS["bytes"])
    for one in together:
        engine.submit(one)
    run(engine)
    assert [one.output_ids for one in together] == alone


def test_row_that_leaves_in_mid_answer_does_not_disturb_the_others() -> None:
    engine = noise_engine(VOCAB, EOS["bytes"])
    grammar = GRAMMARS["bytes"].regex("[a-z]{12}", "x")
    sequences = [sequence(grammar, seed) for seed in range(4)]
    for one in sequences:
        engine.submit(one)
    for _ in range(5):
        engine.step()
    sequences[0].ended_by = FinishReason.ABORT
    run(engine)
    assert [one.finish_reason for one in sequences] == [FinishReason.ABORT, *["stop"] * 3]
    assert all(re.fullmatch("[a-z]{12}", text_of("bytes", one)) for one in sequences[1:])


def test_grammar_that_gives_up_fails_its_own_row_and_says_why() -> None:
    engine = noise_engine(VOCAB, EOS["bytes"])
    # More ways to read what there is with each character, which is always the same.
    ambiguous = GRAMMARS["bytes"].lark('start: s\ns: s s | s s s | s s s s | "a"', "x")
    a = TOKENIZERS["bytes"].backend_tokenizer.token_to_id("a")
    hostile = sequence(ambiguous, logit_bias={a: 100.0})
    others = [sequence(None, 1, 20), sequence(None, 2, 20)]
    for one in [others[0], hostile, others[1]]:
        engine.submit(one)
    run(engine)
    assert hostile.finish_reason is FinishReason.DEAD_END
    assert (
        hostile.error is not None
        and "grammar cannot be followed: it is too ambiguous" in hostile.error
    )
    assert [one.error for one in others] == [None, None]


class Panic(BaseException):
    """As pyo3's, which is no Exception."""


class BrokenConstraint(GrammarConstraint):
    """llguidance raises for it, once the answer has some tokens."""

    num_left = 2

    def finish_mask(self, mask: NDArray[np.uint32], end_ids: frozenset[int]) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise Panic("index out of bounds")
        super().finish_mask(mask, end_ids)


def test_mask_that_panics_costs_its_own_row_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    engine = noise_engine(VOCAB, EOS["bytes"])
    good = GRAMMARS["bytes"].regex("[a-z]{12}", "x")
    rows = [sequence(good, seed) for seed in range(3)]
    whole = rows[1].constraint
    assert isinstance(whole, GrammarConstraint)
    rows[1].constraint = BrokenConstraint(whole.matcher, whole.num_words, EOS["bytes"])
    for one in [*rows, sequence(None, 3, 20)]:
        engine.submit(one)
    run(engine)
    assert not engine.has_failed
    assert [one.finish_reason for one in rows] == ["stop", FinishReason.DEAD_END, "stop"]
    assert rows[1].error is not None and "llguidance failed: Panic" in rows[1].error
    assert "a grammar fails its answer" in caplog.text


def test_token_that_panics_costs_its_own_row_the_answer() -> None:
    class Matcher:
        def consume_token(self, token_id: int) -> None:
            raise Panic

    constraint = GrammarConstraint(Matcher(), 1, EOS["bytes"])  # type: ignore[arg-type]
    constraint.accept(1)
    assert constraint.error == "llguidance failed: Panic"


def test_step_whose_model_raises_leaves_the_next_one_alone() -> None:
    class Model(NoiseModel):
        num_steps = 0

        def forward(self, plan: StepPlan, cache: TokenCache) -> NDArray[np.float32]:
            self.num_steps += 1
            if self.num_steps == 3:
                raise RuntimeError("the device is lost")
            return super().forward(plan, cache)

    scheduler = Scheduler(4, 512, 512, EOS["bytes"])
    engine = Engine(Model(VOCAB), TokenCache(4), scheduler, Unobserved())  # type: ignore[arg-type]
    grammar = GRAMMARS["bytes"].regex("[a-z]{12}", "x")
    hurt, whole = sequence(grammar, 0), sequence(grammar, 1)
    engine.submit(hurt)
    while not hurt.is_finished:
        engine.step()
    engine.submit(whole)
    run(engine)
    assert (hurt.finish_reason, whole.finish_reason) == (FinishReason.ERROR, FinishReason.STOP)
    assert re.fullmatch("[a-z]{12}", text_of("bytes", whole))


def test_constraint_that_has_no_masks_is_not_passed_over() -> None:
    class Other:
        is_complete, error = False, None

        def accept(self, token_id: int) -> None: ...

    one = sequence(None)
    one.constraint = Other()
    with pytest.raises(TypeError, match="row 1: Other has no masks"):
        MaskWorker().start([sequence(None), one])


def test_step_without_constrained_rows_takes_no_thread() -> None:
    worker = MaskWorker()
    worker.start([sequence(None)])
    assert worker.collect() == {}
    assert worker._pool is None


# --- what is refused ------------------------------------------------------------------------------

G = GRAMMARS["bytes"]
DEEP: Any = {}
for _ in range(3000):
    DEEP = {"items": DEEP}


def chain(length: int) -> dict[str, Any]:
    links = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(length)}
    return {"$defs": links | {str(length): {}}, "$ref": "#/$defs/0"}


def pattern_chain(length: int) -> dict[str, Any]:
    links: dict[str, Any] = {
        str(i): {"$ref": f"#/$defs/{i + 1}", "pattern": f"a{i}.*b"} for i in range(length)
    }
    return {"$defs": links | {str(length): {"type": "string"}}, "$ref": "#/$defs/0"}


def nested_patterns(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for i in range(depth):
        inner = {"pattern": f".*a.{{{i}}}b.*", "anyOf": [inner, {"type": "null"}]}
    return inner


REFUSED: dict[str, tuple[Callable[[], Grammar], str]] = {
    "keyword": (lambda: G.json_schema({"not": {}}, "x"), "'not' is not supported"),
    "unknown keyword": (lambda: G.json_schema({"items": {"maxItem": 3}}, "x"), "'maxItem'"),
    "options": (lambda: G.json_schema({"x-guidance": {"lenient": True}}, "x"), "'x-guidance'"),
    "type": (lambda: G.json_schema({"type": "strin"}, "x"), "Invalid type: strin"),
    "format": (lambda: G.json_schema({"format": "zzz"}, "x"), "Unknown format: zzz"),
    "no object": (lambda: G.json_schema(True, "x"), "must be a JSON object"),
    "contradiction": (
        lambda: G.json_schema({"type": "integer", "minimum": 3, "maximum": 1}, "x"),
        "Unsatisfiable schema",
    ),
    "itself": (lambda: G.json_schema({"$ref": "#"}, "x"), "nothing matches it"),
    "remote": (lambda: G.json_schema({"$ref": "http://x/y"}, "x"), "only '#'"),
    "deep": (lambda: G.json_schema(DEEP, "x"), "nested more than 60 levels"),
    "huge": (
        lambda: G.json_schema({"properties": {f"p{i}": {} for i in range(5000)}}, "x"),
        "at most 32768",
    ),
    "chain": (lambda: G.json_schema(chain(700), "x"), "at most 500"),
    "parts": (
        lambda: G.json_schema({"allOf": [{"minLength": i} for i in range(50)]}, "x"),
        "at most 16",
    ),
    "patterns": (
        lambda: G.json_schema({"allOf": [{"pattern": f".*a.{{{i}}}b.*"} for i in range(16)]}, "x"),
        "at most 3 can",
    ),
    "patterns behind references": (lambda: G.json_schema(pattern_chain(30), "x"), "at most 3 can"),
    "patterns behind alternatives": (
        lambda: G.json_schema(nested_patterns(8), "x"),
        "at most 3 can",
    ),
    "patterns inside": (
        lambda: G.json_schema(
            {"allOf": [{"properties": {"a": {"pattern": f"a{i}.*b"}}} for i in range(9)]}, "x"
        ),
        "at most 3 can",
    ),
    "patterns in circles": (
        lambda: G.json_schema(
            {"allOf": [{"items": {"$ref": "#"}}, {"items": {"pattern": "a"}}], "pattern": "b"}, "x"
        ),
        "at most 3 can",
    ),
    "no list": (lambda: G.json_schema({"allOf": 3}, "x"), "allOf must be a list"),
    "no map": (lambda: G.json_schema({"patternProperties": 3}, "x"), "must be an object"),
    "no reference": (lambda: G.json_schema({"$ref": {}}, "x"), "only '#'"),
    "pattern properties": (
        lambda: G.json_schema({"patternProperties": {f"^{i}a.*$": {} for i in range(9)}}, "x"),
        "at most 8",
    ),
    "into a default": (lambda: G.json_schema({"$ref": "#/default"}, "x"), "only '#'"),
    "into a value": (
        lambda: G.json_schema({"$defs": {"a": {"const": {}}}, "$ref": "#/$defs/a/const"}, "x"),
        "only '#'",
    ),
    "nowhere": (lambda: G.json_schema({"$ref": "#/$defs/a"}, "x"), "there is no '#/$defs/a'"),
    "id inside": (lambda: G.json_schema({"items": {"$id": "http://a/"}}, "x"), "$id"),
    "no multiple": (lambda: G.json_schema({"multipleOf": 0}, "x"), "more than 0"),
    "negative multiple": (lambda: G.json_schema({"multipleOf": -2}, "x"), "more than 0"),
    "properties counted": (lambda: G.json_schema({"minProperties": 2}, "x"), "minProperties: 2"),
    "class in class": (lambda: G.json_schema({"pattern": "[a[b]]"}, "x"), "[ inside [...]"),
    "named class": (lambda: G.json_schema({"pattern": "^[[:alpha:]]$"}, "x"), "[ inside [...]"),
    "intersected class": (lambda: G.json_schema({"pattern": r"[\w&&a]"}, "x"), "&& inside [...]"),
    "class in a name": (
        lambda: G.json_schema({"patternProperties": {"[a[b]]": {}}}, "x"),
        "[ inside [...]",
    ),
    "multiple": (lambda: G.json_schema({"type": "integer", "multipleOf": 99999999}, "x"), "digits"),
    "control character": (lambda: G.json_schema({"enum": ["0\x1f"]}, "x"), "U+001F"),
    "control name": (lambda: G.json_schema({"properties": {"\x00": {}}}, "x"), "U+0000"),
    "large integer": (lambda: G.json_schema({"enum": [1, {"a": 2**53 + 1}]}, "x"), "2**53"),
    "regex": (lambda: G.regex("(a", "x"), "unclosed group"),
    "look-ahead": (lambda: G.regex("(?=a)b", "x"), "look-around"),
    "long regex": (lambda: G.regex("a" * 5000, "x"), "at most 4096"),
    "no match": (lambda: G.regex(r"[^\s\S]", "x"), "nothing matches it"),
    "rule": (lambda: G.lark("start: foo", "x"), 'unknown name: "foo"'),
    "own format": (
        lambda: G.lark('{"grammars": [{"json_schema": {"x-guidance": {"lenient": true}}}]}', "x"),
        "expecting rule",
    ),
    "options in lark": (
        lambda: G.lark('start: "a"\n%llguidance {"no_forcing": false}', "x"),
        "%llguidance: options cannot be given",
    ),
    "options in lark in lark": (
        lambda: G.lark(
            'start: %lark { start: "a"\n%llguidance {"allow_invalid_utf8": true} }', "x"
        ),
        "%llguidance: options cannot be given",
    ),
    "options in a schema in lark": (
        lambda: G.lark('start: %json {"x-guidance": {"lenient": true}}', "x"),
        "'x-guidance' is not supported",
    ),
    "options in a schema behind a comment": (
        lambda: G.lark('start: %json // a\n {"x-guidance": {"lenient": true}}', "x"),
        "no JSON",
    ),
    "control token": (lambda: G.lark("start: <|tool|>", "x"), "unknown special token"),
    "schema in lark": (lambda: G.lark('start: %json {"a": 1}', "x"), "'a' is not supported"),
    "broken schema in lark": (lambda: G.lark('start: %json {"a: 1}', "x"), "no JSON"),
    "rules": (lambda: G.lark("start: A\n" + "A: B\n" * 2000, "x"), "1000 lines"),
    "hidden operators": (
        lambda: G.lark('start: A\nA: /\n?"?.*a0.*"?/' + ' & /"?.*a.*"?/' * 17, "x"),
        "of & and ~",
    ),
    "end token": (lambda: G.lark('start: "a" <|im_end|> "b"', "x"), "the token 262 (<|im_end|>)"),
    "end token by id": (lambda: G.lark('start: "a" <[262]> "b"', "x"), "<[262]>: the token 262"),
    "end token in a range": (lambda: G.lark('start: "a" <[1,255-300]>', "x"), "the token 260"),
    "end token among all": (lambda: G.lark('start: "a" <[*]>', "x"), "the token 260"),
    "end token not excluded": (lambda: G.lark('start: "a" <[^260]>', "x"), "the token 262"),
    "json in a string": (lambda: G.lark('start: "%json" "a"', "x"), "in a string or a comment"),
    "many alternatives": (
        lambda: G.lark("start: " + " | ".join(f'"w{i}x"' for i in range(1900)), "x"),
        "too many alternatives",
    ),
    "many properties": (
        lambda: G.json_schema(
            {"type": "object", "properties": {f"p{i}": {} for i in range(900)}}, "x"
        ),
        "too many alternatives",
    ),
    "operators": (lambda: G.lark("start: A\nA: " + " & ".join(["/.*a.*/"] * 50), "x"), "of & and"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_to_is_refused_quickly(name: str) -> None:
    make, message = REFUSED[name]
    started_at = time.process_time()
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert time.process_time() - started_at < 2
    assert refused.value.param == "x"
    assert refused.value.message.startswith("x: ")
    assert message in refused.value.message


# Patterns whose common matches are hard to find: positions counted from anywhere, primes, words.
SEARCH = r"""
import itertools, resource
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from tests.test_grammar import GRAMMARS, InvalidRequest
families = [
    [f".*a.{{{n}}}b.*" for n in (5, 25, 1000)],
    [f"^[01]*1[01]{{{n}}}$" for n in (18, 19, 20)],
    [f"^(a{{{n}}})+$" for n in (97, 101, 103)],
    [r"(\\w+ ){5,50}", r"^(.{0,20}b)*$", r"^\\W*\\d{3,90}"],
]
num_refused = 0
for patterns in itertools.chain(families, zip(*families[:3]), zip(*families[1:])):
    for number, more in itertools.product((1, 2, 3), ({}, {"minLength": 30, "maxLength": 900})):
        schema = {"type": "string", "allOf": [{"pattern": p} for p in patterns[:number]]}
        before = resource.getrusage(resource.RUSAGE_SELF)
        try:
            GRAMMARS["bytes"].json_schema(schema | more, "x")
        except InvalidRequest as error:
            assert "at most 3" not in error.message
            num_refused += 1
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert after.ru_utime - before.ru_utime < 2, schema
        assert after.ru_maxrss - before.ru_maxrss < 500_000, schema  # kB
print(num_refused)
"""


def test_patterns_within_the_limit_cost_neither_time_nor_memory() -> None:
    command = [sys.executable, "-c", SEARCH]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 60  # of 60: by llguidance, which gives up early


HOSTILE: dict[str, Callable[[], Grammar]] = {
    "nested counts": lambda: G.regex(r"(((\w{1,900}){1,900}){1,900}){1,900}", "x"),
    "optional parts": lambda: G.regex("a?" * 2000 + "b", "x"),
    "optional groups": lambda: G.regex("(a?b)?" * 600, "x"),
    "ambiguous": lambda: G.lark(
        'start: s\ns: s s | "a" | "b" s "c" | ' + "|".join("s " * i for i in range(2, 60)), "x"
    ),
    "doubling": lambda: G.lark(
        "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(30)) + 'A30: "x"', "x"
    ),
    "rules": lambda: G.lark(
        "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(900)) + 'a900: "x"', "x"
    ),
    "references": lambda: G.json_schema(chain(490), "x"),
    "properties": lambda: G.json_schema(
        {"properties": {f"p{i}": {"maxLength": 30} for i in range(900)}}, "x"
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_costly_grammar_is_refused_or_fails_alone_in_bounded_time(name: str) -> None:
    started_at = time.process_time()
    try:
        [answer] = generate("bytes", HOSTILE[name](), count=1, max_tokens=30)
    except InvalidRequest:
        pass
    else:
        assert answer.is_finished
    assert time.process_time() - started_at < 4


# --- the default model ----------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "color": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "age", "color", "tags"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_hundred_of_hundred_answers_of_the_default_model_validate() -> None:
    from app.model import OnnxModel

    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(DEFAULT)
    model = OnnxModel.load(DEFAULT, "cpu", num_threads=2)
    cache = KVCache(model.spec.kv, 32, 256, model.device)
    eos_ids = frozenset({0, 2})
    engine = Engine(model, cache, Scheduler(32, 256, 64, eos_ids), Unobserved())
    grammars = Grammars(tokenizer.backend_tokenizer, model.spec.vocab_size, eos_ids)
    grammar = grammars.json_schema(PERSON, "x")
    prompt = tokenizer.encode("A person as JSON:\n")
    sequences = [
        Sequence(
            f"r{seed}",
            list(prompt),
            SamplingParams(max_tokens=200, temperature=1.0, seed=seed),
            grammar.constraint(),
        )
        for seed in range(100)
    ]
    for one in sequences:
        engine.submit(one)
    run(engine)
    assert {one.finish_reason for one in sequences} == {FinishReason.STOP}
    validator = jsonschema_rs.validator_for(PERSON)
    texts = [
        tokenizer.decode([id_ for id_ in one.output_ids if id_ not in eos_ids]) for one in sequences
    ]
    assert sum(validator.is_valid(json.loads(text)) for text in texts) == 100
    assert len({*texts}) > 90
    assert isinstance(sequences[0].constraint, GrammarConstraint)
