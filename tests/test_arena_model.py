"""The elastic cache with real tensors and a real graph: contents, answers, memory that returns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from app.arena import Arena, KVLimits, Size
from app.engine import Engine
from app.kv_cache import KVCache, KVShape
from app.sequence import Resize, SamplingParams, Sequence

from .conftest import Bring, TinyModel
from .engines import answers, greedy, loaded_service, real_engine, run
from .folders import make_portable
from .tiny import CONTEXT

CPU = torch.device("cpu")
SHAPE = KVShape(2, 3, 2, torch.float32)
PROMPTS = [[5 + i] * (3 + 7 * i) for i in range(5)]


@pytest.mark.parametrize(
    ("num_slots", "max_len", "filled"),
    [(8, 6, [6, 1, 0, 3]), (4, 12, [2, 6, 6, 0]), (2, 3, [3, 2]), (16, 24, [])],
)
def test_resize_keeps_what_is_filled(num_slots: int, max_len: int, filled: list[int]) -> None:
    cache = KVCache(SHAPE, 4, 6, CPU)
    for index, layer in enumerate(cache.layers):
        layer.copy_(torch.arange(layer.numel()).view(layer.shape) + 1000 * index)
    before = [layer.clone() for layer in cache.layers]
    cache.resize(Resize(num_slots, max_len, filled))
    assert (cache.num_slots, cache.max_len) == (num_slots, max_len)
    for layer, old in zip(cache.layers, before, strict=True):
        assert layer.shape == (num_slots, 3, max_len, 2)
        assert layer.is_contiguous()
        for slot, num_tokens in enumerate(filled):
            assert torch.equal(layer[slot, :, :num_tokens], old[slot, :, :num_tokens])


def test_resize_is_told_by_the_version() -> None:
    cache = KVCache(SHAPE, 4, 6, CPU)
    cache.resize(Resize(4, 6, []))
    assert cache.version == 1


def test_cache_that_cannot_be_resized_has_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, made = KVCache(SHAPE, 4, 6, CPU), iter(range(3))

    def give_out() -> torch.Tensor:
        next(made)  # StopIteration at the last layer
        return torch.zeros(8, 3, 6, 2)

    monkeypatch.setattr(cache, "_new_layer", give_out)
    with pytest.raises(StopIteration):
        cache.resize(Resize(8, 6, [6]))
    assert (cache.num_slots, cache.max_len) == (0, 0)
    monkeypatch.undo()
    cache.resize(Resize(1, 6, []))
    assert [tuple(layer.shape) for layer in cache.layers] == [(1, 3, 6, 2)] * 4


def resident() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def test_memory_returns_when_the_cache_is_made_anew() -> None:
    cache = KVCache(KVShape(2, 4, 64, torch.float32), 32, 1024, CPU)  # 128 MiB
    before = resident()
    for index in range(4):
        cache.layers[index].fill_(1)
    full = resident()
    cache.resize(Resize(32, 1024, [100]))
    after = resident()
    assert full - before > 120 << 20
    assert after - before < 16 << 20


def elastic(rows: int, length: int, first_len: int = 8, *, is_lazy: bool = False) -> Arena:
    """With room for so many rows of that length."""
    limits = KVLimits(5, CONTEXT, first_len, bytes_per_token=1, bytes_per_row=0, is_lazy=is_lazy)
    return Arena(limits, max(rows * length, CONTEXT))


@pytest.fixture(scope="module", params=["fused", "portable"])
def folder(request: pytest.FixtureRequest, tiny_llama: TinyModel, bring: Bring) -> Path:
    if request.param == "fused":
        return tiny_llama.folder
    return bring(make_portable, tiny_llama.source)


def mixed() -> list[Sequence]:
    """Greedy, seeded, and with all that the sampler keeps from step to step."""
    kinds = [
        SamplingParams(60),
        SamplingParams(60, temperature=1.0, seed=3, repetition_penalty=1.3),
        SamplingParams(60, temperature=0.7, seed=9, frequency_penalty=0.4, num_logprobs=2),
        SamplingParams(60, repetition_guard=5, min_tokens=10),
        SamplingParams(60, temperature=1.2, seed=5, top_k=40),
    ]
    return [
        Sequence(str(i), list(p), k) for i, (p, k) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]


@pytest.mark.parametrize("is_lazy", [False, True])
def test_answers_are_the_same_in_small_slots_and_after_preemptions(
    folder: Path, is_lazy: bool
) -> None:
    alone = [answers(real_engine(folder, 5, 8), [each])[0] for each in mixed()]
    engine = real_engine(folder, 5, 8, arena=elastic(3, 64, is_lazy=is_lazy))
    sequences = mixed()
    assert answers(engine, sequences) == alone
    assert sum(each.num_preemptions for each in sequences) > 0
    assert sequences[0].num_preemptions == 0


def test_deterministic_answers_have_the_same_bits_after_a_preemption(
    tiny_llama: TinyModel,
) -> None:
    def logprobs(engine: Engine, others: int) -> tuple[Sequence, list[float]]:
        for i in range(others):
            engine.submit(greedy(str(i), PROMPTS[4], 60))
        probe = Sequence("probe", list(PROMPTS[3]), SamplingParams(60, num_logprobs=1))
        engine.submit(probe)
        told = [each.logprobs for each in run(engine) if each.sequence is probe]
        return probe, [each.logprob for each in told if each is not None]

    def engine(arena: Arena | None = None) -> Engine:
        return real_engine(tiny_llama.folder, 5, 8, deterministic=True, arena=arena)

    alone, expected = logprobs(engine(), 0)
    probe, found = logprobs(engine(elastic(2, 64)), 3)
    assert probe.num_preemptions > 0
    assert probe.output_ids == alone.output_ids
    assert found == expected  # not nearly: the very same


def test_cache_of_a_busy_engine_grows_and_of_an_idle_one_returns(tiny_llama: TinyModel) -> None:
    engine = real_engine(tiny_llama.folder, 5, 8, arena=elastic(5, CONTEXT))
    answers(engine, [greedy(str(i), p, 40) for i, p in enumerate(PROMPTS)])
    cache = engine._cache
    assert (cache.num_slots, cache.max_len) == (5, 128)
    engine.rest()
    assert (cache.num_slots, cache.max_len) == Size(1, 8)
    assert answers(engine, [greedy("a", [7] * 20, 9)]) == answers(
        real_engine(tiny_llama.folder), [greedy("a", [7] * 20, 9)]
    )


def test_settings_and_the_free_memory_reach_the_engine(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.model.memory_reader", lambda: lambda: 10**9)
    arguments = ["--kv-memory-share", "0.25", "--kv-idle-seconds", "1000"]
    engine: Any = loaded_service(tiny_llama.folder, *arguments).bridge._engine
    arena = engine._scheduler.arena
    assert arena.budget == 0.25 * 10**9
    arena.budget = engine._look_at = 0
    answers(engine, [greedy("one", [7] * 5, 3)])
    assert arena.budget == 0.25 * 10**9  # it has looked again
    assert 900 < engine.seconds_to_rest <= 1000
