"""What requests do to logits: against the slow reference, and against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from app.candidates import candidates
from app.edits import edits_of
from app.sampler import sample
from app.sequence import SamplingParams, Sequence

from .sampling import distribution, edited

WIDTH = 40  # more than a word of a mask
quick = settings(deadline=None, max_examples=40)

# Quarters, and penalties that divide them exactly: ties are frequent, and rounding decides nothing.
logits = st.lists(
    st.integers(-400, 400).map(lambda n: n / 4) | st.sampled_from([-math.inf, 1e30, -1e30]),
    min_size=WIDTH,
    max_size=WIDTH,
).filter(lambda values: max(values) > -math.inf)
ids = st.integers(0, WIDTH - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    min_tokens=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 4.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.0]),
    logit_bias=st.dictionaries(ids, st.integers(-100, 100).map(float), max_size=5),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=20).map(tuple),
    banned_token_ids=st.lists(ids, max_size=5).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    num_logprobs=st.none() | st.integers(0, 20),
)
sequences = st.builds(
    Sequence,
    request_id=st.just("id"),
    prompt_ids=st.lists(ids, min_size=1, max_size=10),
    params=params,
    output_ids=st.lists(ids, max_size=10),
    end_ids=st.frozensets(ids, max_size=3),
)
masks = st.none() | st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3).map(
    lambda words: np.array(words, np.uint32)
)
requests = st.tuples(logits, sequences, masks)


def copy(sequence: Sequence) -> Sequence:
    """Another at the same place, that has not met the sampler."""
    fields = sequence.prompt_ids, sequence.params
    made = Sequence("id", *fields, output_ids=[*sequence.output_ids])
    made.end_ids = sequence.end_ids
    return made


def edit_row(
    values: list[float], sequence: Sequence, mask: NDArray[np.uint32] | None = None
) -> list[float]:
    row = np.array(values, np.float32)
    before = row.copy()
    edited = edits_of(sequence).apply(row, sequence, mask, np.empty_like(row))
    result: list[float] = edited.tolist()
    assert np.array_equal(row, before), "the model's own row stays"
    return result


def make(prompt: list[int], output: list[int], **fields: object) -> Sequence:
    return Sequence("id", prompt, SamplingParams(99, **fields), output_ids=output)  # type: ignore[arg-type]


@quick
@given(requests)
def test_logits_are_edited_as_the_definitions_say(
    request_: tuple[list[float], Sequence, NDArray[np.uint32] | None],
) -> None:
    values, sequence, mask = request_
    expected = np.array(edited(values, sequence, mask), np.float32)
    assert edit_row(values, sequence, mask) == expected.tolist()


@quick
@given(requests)
def test_choice_is_one_that_the_definitions_permit(
    request_: tuple[list[float], Sequence, NDArray[np.uint32] | None],
) -> None:
    values, sequence, mask = request_
    masks = {} if mask is None else {0: mask}
    sampled = sample(np.array([values], np.float32), [sequence], masks)
    left = np.array(edited(values, sequence, mask), np.float32).tolist()
    assert sampled.is_finite[0]
    assert sampled.has_choice[0] == (max(left) > -math.inf)
    if not sampled.has_choice[0]:
        assert dict(sampled.logprobs) == {}
        return
    chosen, asked = int(sampled.token_ids[0]), sequence.params
    if asked.temperature == 0:
        assert chosen == left.index(max(left))
    else:
        kept = distribution(
            left, asked.temperature, asked.top_k, asked.top_p, asked.min_p, slack=1e-9
        )
        assert chosen in kept
    assert (0 in sampled.logprobs) == (asked.num_logprobs is not None)


@settings(quick, max_examples=20)
@given(st.lists(requests, min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_row_alone_gets_what_it_gets_in_company(
    batch: list[tuple[list[float], Sequence, NDArray[np.uint32] | None]], order: object
) -> None:
    order.shuffle(batch)  # type: ignore[attr-defined]
    rows = np.array([values for values, _, _ in batch], np.float32)
    rows[0, 3] = math.nan  # a row that fails is company, too
    masks = {row: mask for row, (_, _, mask) in enumerate(batch) if mask is not None}
    together = sample(rows, [copy(sequence) for _, sequence, _ in batch], masks)
    assert not together.is_finite[0]
    for row, (values, sequence, mask) in list(enumerate(batch))[1:]:
        alone = sample(
            np.array([values], np.float32), [copy(sequence)], {} if mask is None else {0: mask}
        )
        assert together.is_finite[row]
        assert together.has_choice[row] == alone.has_choice[0]
        if alone.has_choice[0]:
            assert together.token_ids[row] == alone.token_ids[0]
            assert together.logprobs.get(row) == alone.logprobs.get(0)


@quick
@given(sequences, st.lists(ids, min_size=1, max_size=10), logits)
def test_state_that_is_kept_is_that_of_a_sequence_seen_as_a_whole(
    sequence: Sequence, tokens: list[int], values: list[float]
) -> None:
    for token in tokens:
        edit_row(values, sequence)
        sequence.output_ids.append(token)
    assert edit_row(values, sequence) == edit_row(values, copy(sequence))


def test_row_without_a_token_left_is_marked_and_its_neighbour_served() -> None:
    nothing = make([1], [], allowed_token_ids=(2,), banned_token_ids=(2,), temperature=1.0)
    rows = np.array([[1.0, 2.0, 3.0]] * 2, np.float32)
    sampled = sample(rows, [nothing, make([1], [])])
    assert sampled.has_choice.tolist() == [False, True]
    assert sampled.is_finite.all()
    assert sampled.token_ids[1] == 2


def test_end_tokens_wait_for_min_tokens() -> None:
    sequence = make([1], [0], min_tokens=2)
    sequence.end_ids = frozenset({2, 99})  # one that the graph does not have
    assert edit_row([1.0, 2.0, 3.0], sequence) == [1.0, 2.0, -math.inf]
    sequence.output_ids.append(1)
    assert edit_row([1.0, 2.0, 3.0], sequence) == [1.0, 2.0, 3.0]


def test_bias_and_penalties_do_not_bring_a_forbidden_token_back() -> None:
    fields = {"logit_bias": {0: 100.0}, "presence_penalty": -2.0, "repetition_penalty": 0.5}
    sequence = make([0], [0], banned_token_ids=(0,), **fields)
    assert edit_row([5.0, 2.0], sequence)[0] == -math.inf


def test_penalty_below_1_makes_no_infinity() -> None:
    assert math.isfinite(edit_row([3e38, 0.0], make([0], [], repetition_penalty=0.01))[0])


def test_penalty_above_1_forbids_no_token() -> None:
    assert math.isfinite(edit_row([-3e38, 0.0], make([0], [], repetition_penalty=2.0))[0])


@pytest.mark.parametrize("penalty", [1.1, 1.3, 0.7])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    rng = np.random.default_rng(1)
    row = (rng.standard_normal(500) * 5).astype(np.float32)
    prompt, output = rng.integers(0, 500, 50).tolist(), rng.integers(0, 500, 30).tolist()
    history = torch.tensor([prompt + output])
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(history, torch.tensor(row)[None])[0]
    ours = edit_row(row.tolist(), make(prompt, output, repetition_penalty=penalty))
    assert ours == pytest.approx(theirs.tolist(), rel=1e-6)


@pytest.mark.parametrize("size", [50, 5000, 32011])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [(0, 0, 0.9), (0, 0, 0.3), (0, 40, 1), (0, 40, 0.8), (0.1, 0, 1), (0.02, 7, 1), (0.02, 0, 0.9)]
    + [(1.0, 0, 1), (0, 1000, 1), (0, 20000, 0.99)],
)
def test_what_is_kept_is_what_transformers_keep(
    min_p: float, top_k: int, top_p: float, temperature: float, size: int
) -> None:
    row = (np.random.default_rng(size).standard_normal(size) * 3).astype(np.float32)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    scores = warpers(
        torch.zeros((1, 1), dtype=torch.long), torch.tensor(row, dtype=torch.float64)[None]
    )
    fields = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    kept, weights = candidates(row, float(row.max()), SamplingParams(9, **fields))
    kept = np.arange(size) if kept is None else kept
    assert kept.tolist() == torch.isfinite(scores[0]).nonzero()[:, 0].tolist()
    shares = torch.softmax(scores, 1)[0].numpy()[kept]
    assert np.allclose(weights / weights.sum(), shares, rtol=3e-6)
