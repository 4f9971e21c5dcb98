"""What the load client sends, and when."""

from __future__ import annotations

import statistics
from pathlib import Path
from random import Random

import pytest
from dialects import Target
from workload import (
    Fit,
    ProbeFailed,
    Shape,
    arrivals,
    fit,
    make_conversations,
    make_prompts,
    single_token_words,
)

from .load_server import FakeServer, serving
from .tiny_tokenizers import byte_level_tokenizer


def test_prompts_are_fixed_by_the_seed_and_all_differ() -> None:
    prompts = make_prompts(Random(1), 32, 100)
    assert prompts == make_prompts(Random(1), 32, 100)
    assert len(set(prompts)) == 100


def test_arrivals_are_fixed_by_the_seed_and_poisson() -> None:
    instants = arrivals(Random(3), 5.0, 4000)
    assert instants == arrivals(Random(3), 5.0, 4000) == sorted(instants)
    gaps = [later - earlier for earlier, later in zip([0.0, *instants], instants, strict=False)]
    # Of an exponential distribution mean and deviation are equal, 1/rate.
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)


def test_every_turn_and_shape_is_made_beforehand_and_the_prefix_opens_the_first() -> None:
    shapes = [Shape(3, 8, turns=2), Shape(5, 16, turns=2)]
    said = make_conversations(Random(0), shapes, 50, prefix="once upon")
    assert {talk.shape for talk in said} == set(shapes)
    for talk in said:
        first, second = talk.texts
        assert first.startswith("once upon ")
        assert len(second.split()) == len(first.split()) - 2 == talk.shape.words
    assert len({text for talk in said for text in talk.texts}) == 100


def test_fit_counts_what_the_server_adds_and_what_a_word_costs() -> None:
    class Templating(FakeServer):
        def answer(self, body):  # type: ignore[no-untyped-def]
            status, [*events, last] = super().answer(body)
            last["usage"]["prompt_tokens"] += 9
            return status, [*events, last]

    with serving(Templating()) as url:
        found = fit(Target(url), 64, Random(0))
    assert (found.overhead, found.per_word) == (9, 2)
    assert found.words(64) == round((64 - 9) / 2)


def test_prompt_that_is_shorter_than_what_the_server_adds_is_refused() -> None:
    with pytest.raises(ProbeFailed, match="20 prompt tokens are too few: the server counts 31"):
        Fit(30, 1).words(20)


def test_words_that_are_several_tokens_are_left_out(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    save = getattr(tokenizer, "save", None) or tokenizer.backend_tokenizer.save
    save(str(tmp_path / "tokenizer.json"))
    assert single_token_words(tmp_path) == []  # a token is a byte there
    with pytest.raises(ProbeFailed, match="is not there"):
        single_token_words(tmp_path / "nowhere")
