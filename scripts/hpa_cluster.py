"""Servers in pods, as a queueing model: requests come, wait, run in rows, end.

A step takes longer with more rows, as was measured; each row gets a token of it. What a server
tells of itself is computed by the app's own formula (`app/saturation.py`). Pods start, load, serve,
drain. Knows nothing of what decides on their number.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from app.saturation import Load

TICK_SECONDS = 0.5
# From README's table of the default model, prefills included: 68 tokens/s with 1, 434 with 32.
_STEP_SECONDS, _ROW_SECONDS = 0.0128, 0.0019


@dataclass(frozen=True)
class Server:
    """What all of them are."""

    num_rows: int = 16
    answer_tokens: float = 200.0  # on average; the lengths are exponentially distributed
    wait_target_seconds: float = 5.0
    kv_per_row: float = 0.03  # of the KV cache's budget
    pending_seconds: float = 15.0  # until the container runs: a node found, the image there
    load_seconds: float = 45.0  # from then until the model has produced a token
    probe_seconds: float = 5.0
    drain_seconds: float = 30.0

    def tokens_per_second(self, num_running: int) -> float:
        """Of one row, beside the others."""
        return 1 / (_STEP_SECONDS + _ROW_SECONDS * num_running)

    def requests_per_second(self, utilization: float) -> float:
        rows = self.num_rows * utilization
        return rows * self.tokens_per_second(round(rows)) / self.answer_tokens

    def num_needed(self, requests_per_second: float, utilization: float) -> int:
        return int(np.ceil(requests_per_second / self.requests_per_second(utilization)))


@dataclass(eq=False)
class Pod:
    server: Server
    created_at: float
    leaves_at: float | None = None  # drains until then, at the latest
    _running: list[float] = field(default_factory=list)  # tokens that are still to come
    _waiting: deque[tuple[float, float]] = field(default_factory=deque)  # came at, tokens

    @property
    def is_leaving(self) -> bool:
        return self.leaves_at is not None

    def is_started(self, now: float) -> bool:
        return now >= self.created_at + self.server.pending_seconds

    def is_ready(self, now: float) -> bool:
        """As its own health says."""
        took = self.server.pending_seconds + self.server.load_seconds
        return now >= self.created_at + took and not self.is_leaving

    def is_asked(self, now: float) -> bool:
        """As the Service knows, a probe later."""
        return self.is_ready(now - self.server.probe_seconds)

    @property
    def num_open(self) -> int:
        return len(self._running) + len(self._waiting)

    def ask(self, now: float, tokens: float) -> None:
        self._waiting.append((now, tokens))

    def tick(self, now: float) -> list[float]:
        """Seconds that those have waited which run from now on."""
        done = self.server.tokens_per_second(len(self._running)) * TICK_SECONDS
        self._running = [left - done for left in self._running if left > done]
        waits = []
        while self._waiting and len(self._running) < self.server.num_rows:
            came_at, tokens = self._waiting.popleft()
            self._running.append(tokens)
            waits.append(now - came_at)
        return waits

    def load_factor(self) -> float:
        """`phi_serve_load_factor`."""
        server, num = self.server, len(self._running)
        wait = 0.0
        if self._waiting:
            rate = server.num_rows * server.tokens_per_second(server.num_rows)
            wait = (len(self._waiting) + 1) * server.answer_tokens / rate
        load = Load(num, len(self._waiting), server.num_rows, num * server.kv_per_row, wait)
        return load.factor(server.wait_target_seconds)

    def busy_ratio(self) -> float:
        """`phi_serve_engine_busy_ratio`: one request keeps a model busy."""
        return 0.95 if self._running else 0.0


class Cluster:
    """All pods of the Deployment, those that drain too."""

    def __init__(self, server: Server, replicas: int, rng: np.random.Generator) -> None:
        self._server, self._rng = server, rng
        long_ago = -server.pending_seconds - server.load_seconds - server.probe_seconds
        self.pods = [Pod(server, long_ago) for _ in range(replicas)]
        self.num_cut_off = 0  # requests that a drain did not wait for

    @property
    def wanted(self) -> list[Pod]:
        return [pod for pod in self.pods if not pod.is_leaving]

    def num_asked_now(self, now: float) -> int:
        return sum(pod.is_asked(now) for pod in self.pods)

    def scale(self, now: float, replicas: int) -> None:
        """The youngest go first, as a ReplicaSet chooses; they take no new requests."""
        staying = self.wanted
        self.pods += [Pod(self._server, now) for _ in range(replicas - len(staying))]
        for pod in staying[replicas:]:
            pod.leaves_at = now + self._server.drain_seconds

    def tick(self, now: float, requests_per_second: float) -> list[float]:
        """Requests come at random to pods chosen at random. The waits of those that begin."""
        asked = [pod for pod in self.pods if pod.is_asked(now)]
        count = self._rng.poisson(requests_per_second * TICK_SECONDS)
        for tokens in self._rng.exponential(self._server.answer_tokens, count):
            asked[self._rng.integers(len(asked))].ask(now, float(tokens))
        waits = [wait for pod in self.pods for wait in pod.tick(now)]
        for pod in [pod for pod in self.pods if pod.is_leaving]:
            assert pod.leaves_at is not None
            if pod.num_open == 0 or now >= pod.leaves_at:
                self.num_cut_off += pod.num_open
                self.pods.remove(pod)
        return waits
