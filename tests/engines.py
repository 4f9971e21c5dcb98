"""Engines for tests, on a real model folder or on a stub model; and a whole service.

The stub keeps token ids where a model keeps keys, so a row that was moved wrongly, or read before
it was written, is found at once; its next token is a hash of all ids of the row. Libraries that
take seconds are imported where a real model needs them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import gevent
import numpy as np
from numpy.typing import NDArray

from app.arena import Arena
from app.bridge import State
from app.config import read_settings
from app.engine import Engine, Observer, Unobserved
from app.scheduler import Scheduler
from app.sequence import Advance, Move, Resize, SamplingParams, Sequence, StepPlan
from app.service import Service

if TYPE_CHECKING:
    from app.loading import LoadedModel
    from app.text import TextCodec

STUB_VOCAB = 97


class TokenCache:
    """Stands in for KVCache: a row is a list of token ids."""

    def __init__(self, num_rows: int, max_len: int = 1 << 30) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.max_len = max_len

    def apply(self, moves: Iterable[Move]) -> None:
        for move in moves:
            back = self.rows[move.target][: move.num_back]
            assert len(back) == move.num_back, "more goes back than there is"
            assert len(self.rows[move.source]) >= move.num_tokens, "more is moved than there is"
            self.rows[move.target] = self.rows[move.source][: move.num_tokens]
            if back:
                self.rows[move.source] = back

    def resize(self, resize: Resize) -> None:
        rows, self.max_len = self.rows, resize.max_len
        self.rows = [[] for _ in range(resize.num_slots)]
        for slot, num_tokens in enumerate(resize.filled):
            self.rows[slot] = rows[slot][:num_tokens] if num_tokens else []


class StubModel:
    """Next token = hash of the row's ids. `change` may raise, block or change the logits."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.change: Callable[[StepPlan, NDArray[np.float32]], None] = lambda plan, logits: None

    def forward(self, plan: StepPlan, cache: TokenCache) -> NDArray[np.float32]:
        self.plans.append(plan)
        contents = write(plan, cache)
        logits = np.zeros((len(contents), STUB_VOCAB), np.float32)
        for row, ids in enumerate(contents):
            logits[row, stub_next(ids)] = 1.0
        self.change(plan, logits)
        return logits


def write(plan: StepPlan, cache: TokenCache) -> list[list[int]]:
    """The plan's tokens into its rows; of each row that is sampled all that it holds."""
    contents: list[list[int]] = []
    for row, sequence in enumerate(plan.decode):
        _write(cache, row, sequence, sequence.num_cached, [sequence.last_token])
        contents.append(cache.rows[row])
    if plan.prefill is not None:
        chunk = plan.prefill
        assert chunk.row == len(plan.decode), "a prefill lies right behind the decoding rows"
        _write(cache, chunk.row, chunk.sequence, chunk.start, chunk.token_ids)
        if chunk.is_last:
            contents.append(cache.rows[chunk.row])
    return contents


def _write(cache: TokenCache, row: int, owner: Sequence, start: int, ids: list[int]) -> None:
    cache.rows[row] = [*cache.rows[row][:start], *ids]
    assert len(cache.rows[row]) <= cache.max_len, "a row is longer than its slot"
    expected = [*owner.prompt_ids, *owner.output_ids][: start + len(ids)]
    assert cache.rows[row] == expected, f"row {row} does not hold {owner.request_id}"


class NoiseModel:
    """Random logits, of a row's own length and first token: the same alone and in company."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def forward(self, plan: StepPlan, cache: TokenCache) -> NDArray[np.float32]:
        write(plan, cache)
        size = self._vocab_size
        rows = [
            np.random.default_rng([s.prompt_ids[0], len(s.output_ids)]).normal(size=size)
            for s in plan.sampled
        ]
        return np.array(rows, np.float32).reshape(-1, size) * 2


class ScriptedModel:
    """Says `script`, token by token, whatever the prompt."""

    def __init__(self, script: list[int]) -> None:
        self._script = script
        self._vocab = max(script) + 1

    def forward(self, plan: StepPlan, cache: TokenCache) -> NDArray[np.float32]:
        write(plan, cache)
        logits = np.zeros((len(plan.sampled), self._vocab), np.float32)
        for row, sequence in enumerate(plan.sampled):
            logits[row, self._script[len(sequence.output_ids) % len(self._script)]] = 1.0
        return logits


def stub_next(ids: list[int]) -> int:
    return zlib.crc32(bytes(str(ids), "ascii")) % STUB_VOCAB


def stub_answer(prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(stub_next(ids))
    return ids[len(prompt) :]


def stub_engine(
    max_batch_size: int = 4,
    max_model_len: int = 64,
    prefill_chunk: int = 8,
    eos_ids: Iterable[int] = (),
    observer: Observer | None = None,
    arena: Arena | None = None,
    min_shared: int | None = 4,
    prefill_stall: float = 0.0,
) -> tuple[Engine, StubModel]:
    model = StubModel()
    scheduler = Scheduler(
        *(max_batch_size, max_model_len, prefill_chunk, frozenset(eos_ids), arena),
        min_shared=min_shared,
        prefill_stall=prefill_stall,
    )
    cache = TokenCache(*scheduler.arena.size)
    engine = Engine(model, cache, scheduler, observer or Unobserved())  # type: ignore[arg-type]
    return engine, model


def noise_engine(vocab_size: int, eos_ids: Iterable[int], num_rows: int = 8) -> Engine:
    scheduler = Scheduler(num_rows, 4096, 8, frozenset(eos_ids))
    model, cache = NoiseModel(vocab_size), TokenCache(num_rows)
    return Engine(model, cache, scheduler, Unobserved())  # type: ignore[arg-type]


def scripted_engine(
    script: list[int], eos_ids: Iterable[int] = (), observer: Observer | None = None
) -> Engine:
    scheduler = Scheduler(4, 4096, 64, frozenset(eos_ids))
    model, cache = ScriptedModel(script), TokenCache(4)
    return Engine(model, cache, scheduler, observer or Unobserved())  # type: ignore[arg-type]


def real_engine(
    folder: Path,
    max_batch_size: int = 8,
    prefill_chunk: int = 16,
    max_model_len: int = 256,
    *,
    deterministic: bool = False,
    arena: Arena | None = None,
    min_shared: int | None = None,
) -> Engine:
    from app.kv_cache import KVCache
    from app.model import OnnxModel

    model = OnnxModel.load(folder, "cpu", num_threads=1)
    model.deterministic = deterministic
    scheduler = Scheduler(
        *(max_batch_size, max_model_len, prefill_chunk, frozenset(), arena),
        is_exact=deterministic,
        min_shared=min_shared,
    )
    cache = KVCache(model.spec.kv, *scheduler.arena.size, model.device)
    return Engine(model, cache, scheduler, Unobserved())


def loaded_model(name: str, codec: TextCodec, max_model_len: int, vocab_size: int) -> LoadedModel:
    """The hub's side of an engine that no folder was loaded for."""
    from app.chat import ChatTemplate
    from app.grammar import Grammars
    from app.loading import LoadedModel

    created_at, info = 1_700_000_000, {"model": name}
    # A stub's vocabulary may be smaller than the tokenizer's.
    num_ids = max(vocab_size, codec.vocab_size)
    grammars = Grammars(codec.tokenizer, num_ids, codec.eos_ids or frozenset([0]))
    parts = (created_at, info, ChatTemplate(codec), grammars)
    return LoadedModel(name, codec, max_model_len, vocab_size, *parts)


def loaded_service(folder: Path, *arguments: str) -> Service:
    """In this process: it has loaded the folder and made a token, or failed to, and has ended."""
    service = Service(read_settings(["--model", str(folder), "--threads", "1", *arguments]))
    service.bridge.start()
    with gevent.Timeout(60):
        while service.bridge.state is State.LOADING:
            gevent.sleep(0.01)
    service.bridge.request_stop()
    assert service.bridge.ended.wait(60)
    return service


def greedy(name: str, prompt: list[int], num_tokens: int = 8) -> Sequence:
    return Sequence(name, list(prompt), SamplingParams(max_tokens=num_tokens))


def answers(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    """Of sequences that are submitted together."""
    for sequence in sequences:
        engine.submit(sequence)
    run(engine)
    return [sequence.output_ids for sequence in sequences]


def run(engine: Engine, max_steps: int = 5000) -> list[Advance]:
    """Steps until the engine is idle; everything that came out."""
    advances: list[Advance] = []
    for _ in range(max_steps):
        if engine.is_idle:
            return advances
        advances += engine.step()
    raise AssertionError(f"the engine is not idle after {max_steps} steps")
