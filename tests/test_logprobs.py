"""Log-probabilities: against a softmax in float64; whose they are; how much is kept (FR19)."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.candidates import largest
from app.logprobs import log_probabilities
from app.sampler import sample
from app.sequence import SamplingParams, Sequence, TokenLogprobs

VOCAB = 32011


def random_row(seed: int = 0, size: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 4 - 50).astype(np.float32)


def ask(row: np.ndarray, **fields: object) -> tuple[int, TokenLogprobs]:
    sequence = Sequence("id", [5], SamplingParams(9, **fields), output_ids=[5])  # type: ignore[arg-type]
    sampled = sample(row[None], [sequence])
    return int(sampled.token_ids[0]), sampled.logprobs[0]


@pytest.mark.parametrize("number", [0, 1, 5, 20])
@pytest.mark.parametrize("size", [25, 4000, VOCAB])
def test_log_probabilities_are_those_of_a_softmax_likeliest_first(number: int, size: int) -> None:
    row = random_row(number, size)
    expected = torch.log_softmax(torch.tensor(row, dtype=torch.float64), 0).numpy()
    found = log_probabilities(row, float(row.max()), 7, number)
    assert found.logprob == pytest.approx(expected[7], abs=1e-6)
    ids = np.argsort(-expected, kind="stable")[:number].tolist()
    assert [id_ for id_, _ in found.top] == ids
    assert [logprob for _, logprob in found.top] == pytest.approx(expected[ids].tolist(), abs=1e-6)


def test_all_log_probabilities_make_1() -> None:
    row = random_row(size=20)
    found = log_probabilities(row, float(row.max()), 0, 20)
    assert math.fsum(math.exp(logprob) for _, logprob in found.top) == pytest.approx(1, abs=1e-6)


def test_log_probabilities_are_the_models_own_whatever_is_asked_beside_them() -> None:
    row = random_row()
    _, plain = ask(row, num_logprobs=20)
    fields = {"temperature": 2.0, "top_k": 3, "seed": 4, "logit_bias": {5: 100.0, 9: -100.0}}
    token, edited = ask(row, num_logprobs=20, presence_penalty=2.0, **fields)
    assert token == 5
    assert edited.top == plain.top
    assert edited.logprob == log_probabilities(row, float(row.max()), 5, 0).logprob < -5


def test_token_of_probability_0_is_not_among_the_likeliest() -> None:
    _, found = ask(np.array([0.0, -math.inf, 0.0], np.float32), num_logprobs=3)
    assert found.top == ((0, -math.log(2)), (2, -math.log(2)))


def test_rows_that_did_not_ask_have_none() -> None:
    sequences = [Sequence("id", [1], SamplingParams(9, num_logprobs=n)) for n in (None, 0, 2)]
    sampled = sample(np.tile(random_row(size=30), (3, 1)), sequences)
    assert {row: len(found.top) for row, found in sampled.logprobs.items()} == {1: 0, 2: 2}


def test_what_is_kept_of_a_token_is_20_pairs_and_no_array() -> None:
    _, found = ask(random_row(), num_logprobs=20)
    assert len(found.top) == 20
    assert all(type(id_) is int and type(logprob) is float for id_, logprob in found.top)
    pairs = sum(sys.getsizeof(pair) + sys.getsizeof(pair[1]) + 32 for pair in found.top)
    assert pairs + sys.getsizeof(found.top) < 4096


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 6000), st.integers(1, 400), st.integers(1, 50), st.integers(0, 2**32 - 1))
@example(4000, 10, 1, 0)
@example(6000, 300, 3, 0)
def test_largest_are_the_first_of_a_stable_sort(
    size: int, k: int, num_values: int, seed: int
) -> None:
    values = np.random.default_rng(seed).integers(0, num_values, size).astype(np.float32)
    assert largest(values, k).tolist() == np.argsort(-values, kind="stable")[:k].tolist()
