"""One choice's text as its tokens come, put into its stream by hand: whatever comes together, the
deltas join to the text of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from gevent.event import Event

from app.answer import Answer
from app.bridge import TokenStream
from app.completion import Completion, Delta
from app.errors import ClientLeft, DeadlineExceeded, ModelFailure, NotReady
from app.sequence import Advance, FinishReason, SamplingParams, Sequence, TokenLogprobs
from app.text import TextCodec

from .test_stops import STOPS, expected
from .tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

CODECS = {
    "byte-level": TextCodec(byte_level_tokenizer(), frozenset()),
    "sentencepiece": TextCodec(sentencepiece_tokenizer(), frozenset()),
}
CODEC = CODECS["byte-level"]
EOS = CODEC.encode("<|im_end|>", parse_special=True)[0]
ENDS = [FinishReason.LENGTH, FinishReason.STOP, FinishReason.TIMEOUT, FinishReason.REPETITION]


class Said:
    """A choice, and the tokens that its stream brings."""

    def __init__(
        self,
        codec: TextCodec = CODEC,
        stops: Iterable[str] = (),
        end_ids: Iterable[int] = (EOS,),
        **params: Any,
    ) -> None:
        params = {"max_tokens": 999} | params
        self.sequence = Sequence("request", [1], SamplingParams(**params))
        self.sequence.end_ids = frozenset(end_ids)
        self.stream = TokenStream(self.sequence, Event())
        self.completion = Completion(self.stream, codec.detokenizer(), stops)
        self.deltas: list[Delta] = []

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    def put(
        self,
        *ids: int,
        end: FinishReason | None = None,
        error: str | None = None,
        logprobs: bool = False,
    ) -> Said:
        """`ids` come together, with the last one the end; a timeout comes from this side."""
        scores = TokenLogprobs(-1.0, ()) if logprobs else None
        for number, id_ in enumerate(ids, 1):
            is_end = number == len(ids) and end is not FinishReason.TIMEOUT
            reason = end if is_end else None
            self.stream.put(Advance(self.sequence, id_, reason, logprobs=scores))
        if end is FinishReason.TIMEOUT:
            self.take().deltas.append(self.completion.expire())
            return self
        if not ids and end is not None:
            self.stream.put(Advance(self.sequence, None, end, error))
        return self.take()

    def take(self) -> Said:
        """As an answer does: of a choice that has ended no more is asked for."""
        if self.completion.finish_reason is None and (delta := self.completion.take()) is not None:
            self.deltas.append(delta)
        return self


def cuts(ids: list[int], most: int = 2) -> Iterator[list[list[int]]]:
    """`ids` in one part, and in all ways in up to `most` + 1."""
    for num_cuts in range(most + 1):
        for at in combinations(range(1, len(ids)), num_cuts):
            edges = [0, *at, len(ids)]
            yield [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]


# --- half characters --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("end", ENDS)
def test_halves_of_characters_join_however_they_come_and_whatever_ends_them(
    name: str, end: FinishReason
) -> None:
    codec, text = CODECS[name], "\U0001f642é漢\ufffd"
    ids = [id_ for id_ in codec.encode(text) if codec.spell(id_) != b" "]
    for parts in cuts(ids):
        said = Said(codec)
        for part in parts[:-1]:
            said.put(*part)
        said.put(*parts[-1], end=end)
        assert said.text == text
        assert said.text.count("\ufffd") == 1  # the one that the model wrote
        assert said.deltas[-1].finish_reason is end


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("num_ids", [1, 2, 3])
def test_character_that_the_end_cuts_is_one_replacement(end: FinishReason, num_ids: int) -> None:
    ids = CODEC.encode("\U0001f642")[:num_ids]
    for parts in cuts(ids):
        said = Said()
        for part in parts:
            said.put(*part)
        assert said.text == ""
        assert said.put(end=end).text == "\ufffd"


def test_half_a_character_in_front_of_an_end_token_is_one_replacement() -> None:
    said = Said().put(*CODEC.encode("a\U0001f642")[:3]).put(EOS, end=FinishReason.STOP)
    assert said.text == "a\ufffd"


def test_delta_comes_only_when_there_is_something_to_tell() -> None:
    said = Said()
    for id_ in CODEC.encode("aé"):
        said.put(id_)
    assert said.put(end=FinishReason.LENGTH).deltas == [
        *(Delta("a"), Delta("é"), Delta("", FinishReason.LENGTH)),
    ]


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
def test_end_token_counts_and_is_neither_text_nor_among_the_tokens(together: bool) -> None:
    [a], [b] = CODEC.encode("a"), CODEC.encode("b")
    said = Said(end_ids=[b], num_logprobs=0)  # one with a text of its own: it would be seen
    if not together:
        said.put(a, logprobs=True)
        said.put(b, end=FinishReason.STOP, logprobs=True)
    else:
        said.put(a, b, end=FinishReason.STOP, logprobs=True)
    assert (said.text, said.completion.num_tokens) == ("a", 2)
    assert [token.id for delta in said.deltas for token in delta.tokens] == [a]
    assert said.deltas[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    "text", ["ABCDEFGHIJKL", "one\nUser: two", "xaaab", "é é!", "ABCDEFGHI", "\nUse", "é"]
)
def test_stop_string_over_token_borders_ends_like_on_the_whole_text(text: str) -> None:
    wanted, is_stopped = expected(text, STOPS)
    for parts in cuts(CODEC.encode(text)):
        said = Said(stops=STOPS)
        for part in parts:
            said.put(*part)
        said.put(end=FinishReason.LENGTH)
        assert said.text == wanted
        reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
        assert [d.finish_reason for d in said.deltas if d.finish_reason] == [reason]


def test_stop_string_ends_the_sequence_and_what_comes_behind_does_not_count() -> None:
    said = Said(stops=["b"], num_logprobs=0).put(*CODEC.encode("abcd"), logprobs=True)
    assert said.sequence.ended_by is FinishReason.STOP
    assert (said.text, said.completion.num_tokens) == ("a", 2)
    assert [CODEC.spell(token.id) for token in said.deltas[0].tokens] == [b"a", b"b"]


def test_stop_string_with_the_last_token_is_a_stop_and_no_length() -> None:
    said = Said(stops=["bc"]).put(*CODEC.encode("abc"), end=FinishReason.LENGTH)
    assert said.deltas == [Delta("a", FinishReason.STOP)]


def test_stop_string_that_the_cut_off_character_completes_is_a_stop() -> None:
    said = Said(stops=["\ufffd"]).put(*CODEC.encode("aé")[:2], end=FinishReason.LENGTH)
    assert said.deltas == [Delta("a", FinishReason.STOP)]


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "a"), (2, "a"), (3, "aba"), (4, "aba"), (5, "ababa"), (7, "ababab")],
)
def test_stop_string_does_not_end_an_answer_before_its_min_tokens(
    min_tokens: int, text: str
) -> None:
    said = Said(stops=["b"], min_tokens=min_tokens)
    for id_ in CODEC.encode("ababab"):
        said.put(id_)
    said.put(end=FinishReason.LENGTH)
    assert (said.text, said.completion.num_tokens) == (text, min(len(text) + 1, 6))


@pytest.mark.parametrize(
    ("reason", "raised"), [(FinishReason.ERROR, ModelFailure), (FinishReason.ABORT, NotReady)]
)
def test_end_that_the_client_did_not_ask_for_is_raised_with_its_words(
    reason: FinishReason, raised: type[Exception]
) -> None:
    with pytest.raises(raised, match="out of memory"):
        Said().put(end=reason, error="out of memory")


def test_ending_an_answer_gives_what_was_held_back_once() -> None:
    said = Said(stops=["\nUser:"]).put(*CODEC.encode("one\nUs"))
    assert said.completion.expire() == Delta("\nUs", FinishReason.TIMEOUT)
    assert said.sequence.ended_by is FinishReason.TIMEOUT
    said.completion.abort()  # nothing happens any more
    assert said.sequence.ended_by is FinishReason.TIMEOUT


# --- log-probabilities ------------------------------------------------------------------------


def test_tokens_come_once_and_in_order_whether_or_not_their_text_does() -> None:
    ids = CODEC.encode("a\U0001f642b\nUser: c")
    for parts in cuts(ids, most=1):
        said = Said(stops=["\nUser:"], num_logprobs=0)
        for part in parts:
            said.put(*part, logprobs=True)
        said.put(end=FinishReason.LENGTH)
        tokens = [token.id for delta in said.deltas for token in delta.tokens]
        assert tokens == ids[: said.completion.num_tokens]
        assert CODEC.detokenizer().feed(tokens).endswith("\nUser:")


# --- answers of several choices ---------------------------------------------------------------


def answer_of(*choices: Said, deadline_at: float | None = None) -> Answer:
    arrival = Event()
    arrival.set()
    return Answer("request", [said.completion for said in choices], arrival, deadline_at)


def queue(said: Said, text: str, end: FinishReason | None = None) -> Said:
    """Puts without taking."""
    ids = CODEC.encode(text)
    for number, id_ in enumerate(ids, 1):
        said.stream.put(Advance(said.sequence, id_, end if number == len(ids) else None))
    return said


def test_choices_are_told_as_they_come_each_to_its_end() -> None:
    first, second = Said(), queue(Said(stops=["c"]), "bcd")
    answer = iter(answer_of(queue(first, "a", FinishReason.LENGTH), second))
    assert list(answer) == [
        (0, Delta("a", FinishReason.LENGTH)),
        (1, Delta("b", FinishReason.STOP)),
    ]


def test_failure_of_one_choice_is_one_of_the_answer_and_abort_ends_the_others() -> None:
    first, second = queue(Said(), "a"), Said()
    second.stream.put(Advance(second.sequence, None, FinishReason.ERROR, "out of memory"))
    answer = answer_of(first, second)
    with pytest.raises(ModelFailure):
        list(answer)
    answer.abort()
    assert first.sequence.ended_by is FinishReason.ABORT


def test_what_has_come_by_the_deadline_counts() -> None:
    first, second = queue(Said(), "ab"), Said()
    answer = answer_of(first, second, deadline_at=0.0)
    assert list(answer) == [
        (0, Delta("ab")),
        (0, Delta("", FinishReason.TIMEOUT)),
        (1, Delta("", FinishReason.TIMEOUT)),
    ]
    assert {first.sequence.ended_by, second.sequence.ended_by} == {FinishReason.TIMEOUT}


def test_what_came_while_its_reader_was_busy_counts_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("app.answer.time", clock)
    said = queue(Said(), "a")
    answer = answer_of(said, deadline_at=1030.0)
    deltas = iter(answer)
    assert next(deltas) == (0, Delta("a"))
    queue(said, "b").stream.put(Advance(said.sequence, None, FinishReason.TIMEOUT))
    clock.now = 1031.0
    assert list(deltas) == [(0, Delta("b")), (0, Delta("", FinishReason.TIMEOUT))]
    answer.abort()


def test_answer_whose_client_leaves_ends_every_choice_and_tells_its_reader() -> None:
    choices = [queue(Said(), "a"), queue(Said(), "b")]
    answer = answer_of(*choices)
    deltas = iter(answer)
    assert next(deltas) == (0, Delta("a"))
    answer.leave()
    assert [said.sequence.ended_by for said in choices] == [FinishReason.ABORT] * 2
    with pytest.raises(ClientLeft):
        next(deltas)


def test_answer_that_is_complete_at_its_deadline_is_complete() -> None:
    said = queue(Said(), "ab", FinishReason.LENGTH)
    assert list(answer_of(said, deadline_at=0.0)) == [(0, Delta("ab", FinishReason.LENGTH))]


def test_deadline_before_any_token_is_an_error_and_ends_every_choice() -> None:
    choices = [Said(), Said()]
    with pytest.raises(DeadlineExceeded):
        list(answer_of(*choices, deadline_at=0.0))
    assert [said.sequence.ended_by for said in choices] == [FinishReason.TIMEOUT] * 2
