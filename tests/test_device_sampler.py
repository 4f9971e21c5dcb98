"""The sampler in torch against the one in numpy: the same tokens for the same logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.device_sampler import DeviceModel, sample
from app.engine import Engine
from app.loading import _sampled
from app.model import OnnxModel
from app.sampler import NO_MASKS, Sampled
from app.sampler import sample as sample_on_host
from app.scheduler import Scheduler
from app.sequence import SamplingParams, Sequence, StepPlan

from .conftest import TinyModel
from .engines import StubModel, TokenCache, answers, greedy, real_engine, stub_answer
from .logits import ids_of_length
from .test_engine import TimesTold

VOCAB = 1000
PLAIN = SamplingParams(max_tokens=100)


def params(**given: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, **given)  # type: ignore[arg-type]


def sequences(count: int, chosen: SamplingParams, num_outputs: int = 5) -> list[Sequence]:
    """Each with a seed and tokens of its own."""
    rng = np.random.default_rng(7)
    made = []
    for number in range(count):
        prompt = rng.integers(VOCAB, size=9).tolist()
        sequence = Sequence(str(number), prompt, replace(chosen, seed=number))
        sequence.output_ids = rng.integers(VOCAB, size=num_outputs).tolist()
        sequence.end_ids = frozenset([3, 4, 2 * VOCAB])
        made.append(sequence)
    return made


def noise(count: int, vocab: int = VOCAB, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, vocab)).astype(np.float32) * 3


def assert_same(
    logits: NDArray[np.float32],
    make: list[Sequence],
    masks: Mapping[int, NDArray[np.uint32]] = NO_MASKS,
) -> None:
    expected = sample_on_host(logits, make, masks)
    for sequence in make:
        sequence.sampler_state = None  # the other sampler's
    found = sample(torch.from_numpy(logits), make, masks)
    np.testing.assert_array_equal(found.is_finite, expected.is_finite)
    np.testing.assert_array_equal(found.has_choice, expected.has_choice)
    counted = expected.is_finite & expected.has_choice
    np.testing.assert_array_equal(found.token_ids[counted], expected.token_ids[counted])
    assert dict(found.logprobs) == dict(expected.logprobs)


@pytest.mark.parametrize(
    "chosen",
    [
        PLAIN,
        params(temperature=1.0),
        params(temperature=0.3),
        params(temperature=1e-40),
        params(temperature=1.5, top_k=1),
        params(temperature=1.0, top_k=20),
        params(temperature=1.0, top_p=0.9),
        params(temperature=1.0, top_p=1e-9),
        params(temperature=1.0, min_p=0.05),
        params(temperature=0.8, top_k=50, top_p=0.8, min_p=0.01),
        params(repetition_penalty=1.3),
        params(temperature=0.7, presence_penalty=1.5, frequency_penalty=-0.5),
        params(temperature=0.7, repetition_penalty=0.8, presence_penalty=-1.0),
        params(logit_bias={5: 100.0, 7: -100.0}),
        params(temperature=1.0, logit_bias={5: 4.0, 6: 4.0, 7: -4.0}),
        params(banned_token_ids=tuple(range(500))),
        params(temperature=1.0, banned_token_ids=tuple(range(998))),
        params(min_tokens=6),
        params(min_tokens=5),
        params(temperature=1.0, num_logprobs=3),
        params(temperature=1.0, allowed_token_ids=(1, 2, 3)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("vocab", [VOCAB, 6000])  # the host's weights are in float32 beyond 4096
def test_tokens_are_those_of_the_host(chosen: SamplingParams, vocab: int) -> None:
    assert_same(noise(40, vocab), sequences(40, chosen))


def test_rows_with_parameters_of_their_own_share_a_batch() -> None:
    kinds = [
        PLAIN,
        params(temperature=1.0),
        params(temperature=0.5, top_k=3),
        params(temperature=1.0, top_p=0.5, num_logprobs=0),
        params(repetition_penalty=2.0),
        params(temperature=2.0, min_p=0.2, logit_bias={9: 3.0}),
    ]
    mixed = [sequences(30, kinds[row % len(kinds)])[row] for row in range(30)]
    mask = np.zeros(VOCAB // 32 + 1, np.uint32)
    mask[1] = 0b1100
    assert_same(noise(30), mixed, {0: mask, 7: mask, 8: mask})


def test_of_ties_the_lowest_ids_are_taken() -> None:
    logits = np.zeros((20, VOCAB), np.float32)
    logits[:, 100:140] = 1
    assert_same(logits, sequences(20, PLAIN))
    assert_same(logits, sequences(20, params(temperature=1.0, top_k=7)))
    assert_same(logits, sequences(20, params(temperature=1.0, top_k=50, top_p=0.3)))


def test_row_that_is_not_finite_or_has_no_choice_is_told_and_costs_no_other() -> None:
    logits = noise(12)
    logits[1, 5] = np.nan
    logits[2, 5] = np.inf
    logits[3] = -np.inf
    logits[4, 5] = -np.inf
    without = params(temperature=1.0, banned_token_ids=tuple(range(VOCAB)))
    mixed = sequences(12, params(temperature=1.0, top_p=0.9))
    mixed[6], mixed[1], mixed[2] = sequences(12, without)[6], *sequences(12, PLAIN)[1:3]
    assert_same(logits, mixed)
    assert sample(torch.from_numpy(logits), mixed).is_finite.tolist()[:4] == [True, *[False] * 3]


def test_forbidden_token_is_never_drawn() -> None:
    logits = noise(1).repeat(500, axis=0)
    banned = tuple(range(0, VOCAB, 2))
    found = sample(
        torch.from_numpy(logits), sequences(500, params(temperature=5.0, banned_token_ids=banned))
    )
    assert (found.token_ids % 2 == 1).all()


def test_half_precision_is_sampled_as_the_same_numbers_in_full() -> None:
    half = torch.from_numpy(noise(30)).half()
    chosen = params(temperature=1.0, top_p=0.9)
    found = sample(half, sequences(30, chosen))
    expected = sample_on_host(half.float().numpy(), sequences(30, chosen))
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)


def test_logits_are_left_as_they_were() -> None:
    logits = torch.from_numpy(noise(8))
    before = logits.clone()
    sample(logits, sequences(8, params(temperature=1.0, repetition_penalty=2.0, min_p=0.1)))
    assert torch.equal(logits, before)


def test_penalties_follow_an_answer_from_step_to_step() -> None:
    chosen = params(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.5)
    ours, theirs = sequences(6, chosen), sequences(6, chosen)
    for step in range(20):
        logits = noise(6, seed=step)
        ids = sample(torch.from_numpy(logits), ours).token_ids
        np.testing.assert_array_equal(ids, sample_on_host(logits, theirs).token_ids)
        for sequence in (*ours, *theirs):
            sequence.output_ids.append(int(ids[int(sequence.request_id)]))


def requests() -> list[Sequence]:
    kinds = [PLAIN, params(temperature=1.0, top_p=0.9), params(num_logprobs=2)]
    short = [replace(kinds[n % 3], max_tokens=8, seed=n) for n in range(6)]
    return [Sequence(str(n), ids_of_length(9 * n + 1), own) for n, own in enumerate(short)]


def test_engine_that_samples_on_the_device_gives_the_same_answers(tiny_llama: TinyModel) -> None:
    expected = answers(real_engine(tiny_llama.folder), requests())
    engine = real_engine(tiny_llama.folder)
    assert isinstance(engine._model, OnnxModel)
    engine._model, engine._sampler = DeviceModel(engine._model), sample
    assert answers(engine, requests()) == expected


class QueueingModel(StubModel):
    """Its logits are there when somebody reads them, as a GPU's."""

    now = 100.0

    def forward(self, plan: StepPlan, cache: TokenCache) -> Any:
        self.now += 0.25
        return torch.from_numpy(super().forward(plan, cache))

    def wait_and_sample(self, logits: torch.Tensor, *given: Any) -> Sampled:
        self.now += 0.5
        return sample(logits, *given)


def test_wait_for_a_queued_run_is_time_inside_the_model() -> None:
    model, told = QueueingModel(), TimesTold()
    scheduler, cache = Scheduler(4, 64, 8, frozenset()), TokenCache(4)
    clock, chosen = (lambda: model.now), model.wait_and_sample
    engine = Engine(model, cache, scheduler, told, clock, sampler=chosen)  # type: ignore[arg-type]
    assert answers(engine, [greedy("one", [1], 2)]) == [stub_answer([1], 2)]
    assert told.times == [(0.75, 0.75, 0.75)] * 2


@pytest.mark.parametrize(("device", "kind"), [("cpu", OnnxModel), ("cuda", DeviceModel)])
def test_logits_stay_on_a_gpu(device: str, kind: type, tiny_llama: TinyModel) -> None:
    model = OnnxModel.load(tiny_llama.folder, "cpu", num_threads=1)
    model.device = torch.device(device)
    run_model, sampler = _sampled(model)
    assert type(run_model) is kind
    assert (sampler is sample) == (device == "cuda")


def test_step_without_a_token_brings_none() -> None:
    assert len(sample(torch.empty(0, VOCAB), []).token_ids) == 0
