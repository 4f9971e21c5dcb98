"""Calls in an answer: found whole, never shown in part, nothing lost, however the text comes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.call_json import ToolCall
from app.tool_calls import ToolParser
from app.tools import HERMES, LLAMA, MISTRAL, PHI4, ToolFormat

from .tiny_chats import chat

NAMES = {"weather", "clock"}
ROME = '{"city":  "Rome"}'
OBJECT = f'{{"name": "weather", "arguments": {ROME}}}'
CALL = ToolCall("weather", ROME)
TEXTS = {
    HERMES: f"<tool_call>\n{OBJECT}\n</tool_call>",
    PHI4: f"<|tool_call|>[{OBJECT}]<|/tool_call|>",
    MISTRAL: f"[TOOL_CALLS] [{OBJECT}]",
    LLAMA: OBJECT.replace("arguments", "parameters"),
}
both = pytest.mark.parametrize("format_", list(TEXTS), ids=lambda format_: format_.name)
marked = pytest.mark.parametrize("format_", [HERMES, PHI4, MISTRAL], ids=lambda f: f.name)


def parsed(
    format_: ToolFormat, parts: Iterable[str], max_calls: int | None = None
) -> list[str | ToolCall]:
    """What the parser gives, with texts joined."""
    parser = ToolParser(format_, NAMES, max_calls)
    given_out = [piece for part in parts for piece in parser.feed(part)] + parser.flush()
    joined: list[str | ToolCall] = []
    for piece in given_out:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            piece = joined.pop() + piece
        joined.append(piece)
    return joined


def cut(text: str, places: Iterable[int]) -> list[str]:
    borders = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


@both
def test_call_is_found_and_its_arguments_are_as_written(format_: ToolFormat) -> None:
    assert parsed(format_, [TEXTS[format_]]) == [CALL]


@both
def test_call_is_found_letter_by_letter(format_: ToolFormat) -> None:
    assert parsed(format_, TEXTS[format_]) == [CALL]


@both
def test_blanks_around_a_call_are_left_out(format_: ToolFormat) -> None:
    assert parsed(format_, ["\n ", TEXTS[format_], "\n"]) == [CALL]


@marked
def test_text_around_a_call_is_given_out(format_: ToolFormat) -> None:
    text = f"I look: \n{TEXTS[format_]} done "
    assert parsed(format_, [text]) == ["I look:", CALL, " done "]


@both
def test_part_of_a_call_is_text_at_the_end(format_: ToolFormat) -> None:
    whole = f"\n{TEXTS[format_]}"
    for end in range(1, len(whole)):
        assert parsed(format_, [whole[:end]]) == [whole[:end]]


def cut_short(format_: ToolFormat, text: str, is_forced: bool = False) -> list[str | ToolCall]:
    parser = ToolParser(format_, NAMES, is_forced=is_forced)
    return parser.feed(text) + parser.flush(is_cut=True)


@both
@pytest.mark.parametrize("is_forced", [False, True])
def test_call_that_is_cut_short_is_one_as_far_as_it_goes(
    format_: ToolFormat, is_forced: bool
) -> None:
    whole = TEXTS[format_]
    begins = len(format_.begin)
    is_named = whole.index('"weather"') + len('"weather"')
    given_from, given_to = whole.index(ROME), whole.index(ROME) + len(ROME)
    for end in range(1, len(whole)):
        told = cut_short(format_, whole[:end], is_forced)
        if end >= is_named:
            assert told == [ToolCall("weather", whole[given_from : min(end, given_to)])]
        elif is_forced or (begins and end >= begins):
            assert told == []
        else:
            assert told == [whole[:end]]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "unknown", "arguments": {"a": ',
        '<tool_call>{"name": "wet',
        '<tool_call>{"nam": ',
        '<tool_call>{"name": "weather", "arguments": [',
        '<tool_call>{"name": "weather", "arguments": {"a" 1}, ',
        '<tool_call>{"name": "weather"; ',
        "<tool_call>{name",
        "<tool_call> so",
        "<tool",
        "less < more",
    ],
)
def test_what_becomes_no_call_is_text_also_if_it_is_cut_short(text: str) -> None:
    assert "".join(map(str, cut_short(HERMES, text))) == text


def test_whole_calls_in_front_of_the_one_that_is_cut_short_stay() -> None:
    text = f'[TOOL_CALLS][{OBJECT}, {{"id": "abc", "name": "clock", "arguments": {{"zo'
    assert cut_short(MISTRAL, text) == [CALL, ToolCall("clock", '{"zo')]
    for end in ("", ",", ", ", ', {"na'):
        assert cut_short(MISTRAL, f"[TOOL_CALLS][{OBJECT}{end}") == [CALL]
    assert cut_short(HERMES, f"so {TEXTS[HERMES]}\n<tool_call>\n") == ["so", CALL]
    two = f"[TOOL_CALLS][{OBJECT} {OBJECT}"
    assert "".join(map(str, cut_short(MISTRAL, two))) == two


def test_object_that_names_no_tool_is_text_where_calls_have_no_marker() -> None:
    for text in ('{"name": "Bob", "parameters": {"a', '{"na', '{"a": 1'):
        assert "".join(map(str, cut_short(LLAMA, text))) == text


@both
@pytest.mark.parametrize(
    "wrong",
    [
        '{"name": "unknown", "arguments": {}}',
        '{"name": "weather", "arguments": []}',
        '{"name": "weather", "arguments": {"a": NaN}}',
        '{"name": "weather", "arguments": {"a" 1}}',
        '{"name": "weather", "arguments": {}, "more": 1}',
        '{"name": "weather", "name": "clock", "arguments": {}}',
        '{"name": "weather", "arguments": {},}',
        '{"name": "weather" "arguments": {}}',
        '{"arguments": {}}',
        "{}",
    ],
)
def test_what_is_no_call_is_text(format_: ToolFormat, wrong: str) -> None:
    text = TEXTS[format_].replace(TEXTS[LLAMA] if format_ is LLAMA else OBJECT, wrong)
    assert parsed(format_, [text]) == [text]
    assert parsed(format_, text) == [text]


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call> so {OBJECT}</tool_call>",
        f"<tool_call>{OBJECT} </tool>",
        f"<tool_call>[{OBJECT}]</tool_call>",
        f"<tool_call>}}{OBJECT}</tool_call>",
        f"<tool_call>'{OBJECT}'</tool_call>",
        "<tool_call>{" + "[" * 5000 + "]" * 5000 + "}</tool_call>",
    ],
)
def test_marker_without_a_call_is_text(text: str) -> None:
    assert parsed(HERMES, [text]) == [text]
    assert parsed(HERMES, text) == [text]


@pytest.mark.parametrize("text", [f"[TOOL_CALLS][{OBJECT} x]", f"[TOOL_CALLS][{OBJECT},]"])
def test_list_with_more_than_calls_is_text(text: str) -> None:
    assert parsed(MISTRAL, [text]) == [text]


def test_call_behind_a_marker_that_began_none_is_found() -> None:
    assert parsed(HERMES, ["<tool_call> hm ", TEXTS[HERMES]]) == ["<tool_call> hm", CALL]


def test_several_calls_are_found() -> None:
    text = TEXTS[HERMES]
    assert parsed(HERMES, [f"{text}\n{text}"]) == [CALL, CALL]
    assert parsed(PHI4, [f"<|tool_call|>[{OBJECT}, {OBJECT}]<|/tool_call|>"]) == [CALL, CALL]


def test_calls_beyond_the_most_are_text() -> None:
    text = TEXTS[HERMES]
    assert parsed(HERMES, [f"{text}\n{text}"], max_calls=1) == [CALL, f"\n{text}"]
    two = f"[TOOL_CALLS][{OBJECT}, {OBJECT}]"
    assert parsed(MISTRAL, [two], max_calls=1) == [two]


def test_marker_within_arguments_ends_nothing() -> None:
    arguments = json.dumps({"a": '</tool_call> \\" } <tool_call> \\'})
    text = f'<tool_call>{{"name": "clock", "arguments": {arguments}}}</tool_call>'
    assert parsed(HERMES, text) == [ToolCall("clock", arguments)]


def test_call_without_arguments_has_none() -> None:
    assert parsed(HERMES, ['<tool_call>{"name": "clock"}</tool_call>']) == [ToolCall("clock", "{}")]


def test_number_of_a_call_is_left_out() -> None:
    text = f'[TOOL_CALLS][{OBJECT[:-1]}, "id": "abcdefghi"}}]'
    assert parsed(MISTRAL, [text]) == [CALL]


@pytest.mark.parametrize("text", ['Say {"name": "clock"}', '{"a": 1} is JSON', "{ no JSON"])
def test_brace_that_begins_no_call_is_text(text: str) -> None:
    assert parsed(LLAMA, [text]) == [text]


@both
def test_text_is_given_out_at_once(format_: ToolFormat) -> None:
    parser = ToolParser(format_, NAMES)
    assert parser.feed("Hello") == ["Hello"]
    assert parser.feed(" you (") == [" you ("]


@marked
def test_only_what_may_become_a_call_is_held_back(format_: ToolFormat) -> None:
    parser = ToolParser(format_, NAMES)
    assert parser.feed(f"so \n{format_.begin[:3]}") == ["so"]
    assert parser.feed("?") == [f" \n{format_.begin[:3]}?"]


PIECES = [
    *("<tool_call>", "</tool_call>", "<tool", "<|tool_call|>[", "]<|/tool_call|>", "[TOOL_CALLS]"),
    *(OBJECT, OBJECT.replace("arguments", "parameters"), "[", "]", ", ", "{", "}", '"', "\\", " "),
    *("\n", "text", *TEXTS.values()),
]


@both
@settings(deadline=None, max_examples=80)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.integers(0, 400))
def test_cut_short_does_not_depend_on_how_the_text_is_cut(
    format_: ToolFormat, text: str, place: int
) -> None:
    text = text[:place]
    parser = ToolParser(format_, NAMES)
    told = [piece for letter in text for piece in parser.feed(letter)] + parser.flush(is_cut=True)
    whole = cut_short(format_, text)
    assert [p for p in told if isinstance(p, ToolCall)] == [
        p for p in whole if isinstance(p, ToolCall)
    ]
    joined = "".join(p for p in told if isinstance(p, str))
    assert joined == "".join(p for p in whole if isinstance(p, str))


@both
@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.lists(st.integers(0, 400), max_size=6),
    st.sampled_from([None, 1]),
)
def test_result_does_not_depend_on_how_the_text_is_cut(
    format_: ToolFormat, text: str, places: list[int], max_calls: int | None
) -> None:
    whole = parsed(format_, [text], max_calls)
    assert parsed(format_, cut(text, places), max_calls) == whole
    assert parsed(format_, text, max_calls) == whole


@both
@settings(deadline=None, max_examples=80)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_text_without_a_call_comes_out_as_it_went_in(format_: ToolFormat, text: str) -> None:
    given_out = parsed(format_, [text])
    if not any(isinstance(piece, ToolCall) for piece in given_out):
        assert "".join(map(str, given_out)) == text


# --- markers that are control tokens --------------------------------------------------------------


@pytest.mark.parametrize(("name", "format_"), [("phi4", PHI4), ("mistral", MISTRAL)])
def test_markers_are_read_from_tokens_if_they_are_shown(name: str, format_: ToolFormat) -> None:
    of = chat(name)
    assert set(of.template.marker_ids) == {m for m in (format_.begin, format_.end) if m}
    ids = of.codec.encode(TEXTS[format_], parse_special=True)
    assert format_.begin not in of.codec.detokenizer().feed(ids)
    text = of.codec.detokenizer(of.template.marker_ids.values()).feed(ids, is_last=True)
    assert parsed(format_, [text]) == [CALL]


def test_other_special_tokens_stay_hidden() -> None:
    of = chat("phi4")
    ids = of.codec.encode("<|end|><|tool_call|>", parse_special=True)
    assert of.codec.detokenizer(of.template.marker_ids.values()).feed(ids) == "<|tool_call|>"
