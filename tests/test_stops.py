"""Stop strings against a reference that reads the whole text, however the text is cut."""

from __future__ import annotations

import sys
from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.stops import StopMatcher

STOPS = ["DEFGHIJ", "\nUser:", "aa", "aab", "é!"]
TEXTS = [
    *("ABCDEFGHIJKL", "ABCDEFGHI", "DEFGHIDEFGHIJ", "one\nUser: two", "one\nUser", "baab", "xaaab"),
    *("é é!", "é", "", "\n\nUser:", "aDEFGHIaa", "aé\nUser:é!"),
]


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text in front of the stop that is complete first, at the same character of the longest;
    and whether there is one."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def read(parts: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join([matcher.feed(part) for part in parts])
    return text + matcher.flush(), matcher.is_stopped


def cut(text: str, at: tuple[int, ...]) -> list[str]:
    edges = [0, *at, len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]


@pytest.mark.parametrize("text", TEXTS)
def test_every_cut_gives_what_the_whole_text_gives(text: str) -> None:
    """All cuts in up to four parts."""
    wanted = expected(text, STOPS)
    inside = range(1, len(text))
    for num_cuts in range(min(3, len(inside)) + 1):
        for at in combinations(inside, num_cuts):
            assert read(cut(text, at), STOPS) == wanted, at


@given(
    stops=st.lists(st.text("abé", min_size=1, max_size=5), max_size=5),
    parts=st.lists(st.text("abé", max_size=4), max_size=12),
)
@example(["aab", "ab", "b"], ["aa", "b"])
@example(["ab", "abab"], ["aba", "b"])
@example(["bab", "ab"], ["b", "ab"])
def test_any_stops_and_any_cut_give_what_the_whole_text_gives(
    stops: list[str], parts: list[str]
) -> None:
    assert read(parts, stops) == expected("".join(parts), stops)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    parts=st.lists(st.text("abc", max_size=3), max_size=10),
)
def test_held_back_is_only_what_can_become_a_stop_and_all_of_that(
    stops: list[str], parts: list[str]
) -> None:
    matcher, given_out, whole = StopMatcher(stops), "", ""
    for part in parts:
        given_out += matcher.feed(part)
        whole += part
        if matcher.is_stopped:
            return
        held = whole.removeprefix(given_out)
        starts = {stop[:n] for stop in stops for n in range(len(stop))}
        assert held == max((s for s in starts if whole.endswith(s)), key=len)


def test_nothing_comes_behind_a_stop() -> None:
    matcher = StopMatcher(["b"])
    assert [matcher.feed("abc"), matcher.feed("d"), matcher.flush()] == ["a", "", ""]


def test_start_of_a_stop_that_never_came_is_text_after_all() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.feed("one\nUs"), matcher.flush(), matcher.flush()] == ["one", "\nUs", ""]


def test_without_stops_text_passes_as_it_comes() -> None:
    matcher = StopMatcher([])
    assert [matcher.feed("ab"), matcher.feed(""), matcher.feed("c")] == ["ab", "", "c"]
    assert not matcher.is_stopped


def num_opcodes(matcher: StopMatcher, text: str) -> int:
    """Of Python that runs to feed `text` character by character."""
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for char in text:
            matcher.feed(char)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("text", ["b" * 3000, "a" * 2000, ("a" * 99 + "b") * 20])
def test_character_costs_the_same_however_long_the_stop_is(text: str) -> None:
    short, long = (num_opcodes(StopMatcher(["a" * n + "c"]), text) for n in (8, 1000))
    assert long < 2 * short
