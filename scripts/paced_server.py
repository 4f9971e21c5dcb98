"""`python scripts/paced_server.py`: `python -m app` on a stub model whose steps take a set time.

Service, routes and sockets are the real ones, and so are scheduler and sampler; the model counts:
the answer's token n is " 0", " 1", ... " 127", " 0", so that a client can tell what it missed.
Nothing of torch, transformers or ONNX Runtime is loaded. For `scripts/bench_connections.py`.

    PACE_MS    milliseconds from step to step
    PACE_FILE  what it holds: "fill", and steps that read a prompt take 5 ms; "steady"; "end", and
               all steps take 5 ms
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import app.service  # noqa: E402  # only now it can be found
from app.__main__ import main  # noqa: E402
from app.detokenizer import Detokenizer  # noqa: E402
from app.engine import Engine  # noqa: E402
from app.scheduler import Scheduler  # noqa: E402
from app.sequence import StepPlan  # noqa: E402
from app.served import Served  # noqa: E402

VOCAB = [b" %d" % n for n in range(128)]
TEXTS: dict[int, str] = {}
CONTEXT = 1 << 20
FAST_SECONDS = 0.005


class Codec:
    """Prompts by their bytes, answers by `VOCAB`."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [byte % len(VOCAB) for byte in text.encode()]

    def detokenizer(self, _: frozenset[int] = frozenset()) -> Detokenizer:
        return Detokenizer(VOCAB, texts=TEXTS)


class Chat:
    """A conversation is its last message."""

    tool_format = None

    def render(self, messages: list[dict[str, Any]], _: Any = None) -> Any:
        text = messages[-1]["content"]
        return SimpleNamespace(text=text, token_ids=Codec().encode(text))


class NoCache:
    def apply(self, moves: Any) -> None:
        pass


class CountingModel:
    def __init__(self, pace_seconds: float, pace_file: Path) -> None:
        self._pace_seconds = pace_seconds
        self._pace_file = pace_file
        self._next_at = 0.0

    def forward(self, plan: StepPlan, cache: Any) -> Any:
        now = time.monotonic()
        word = self._pace_file.read_text()
        is_fast = word == "end" or (word == "fill" and plan.prefill is not None)
        pace = FAST_SECONDS if is_fast else self._pace_seconds
        self._next_at = max(now, self._next_at + pace)
        time.sleep(self._next_at - now)
        sampled = plan.sampled
        logits = np.zeros((len(sampled), len(VOCAB)), np.float32)
        logits[range(len(sampled)), [len(s.output_ids) % len(VOCAB) for s in sampled]] = 1
        return logits


class PacedServer(app.service.Service):
    def _load(self, served: Served) -> Engine:
        rows, chunk = self.settings.max_batch_size or 32, self.settings.prefill_chunk
        scheduler = Scheduler(rows, CONTEXT, chunk, frozenset())
        pace = float(os.environ["PACE_MS"]) / 1000
        model = CountingModel(pace, Path(os.environ["PACE_FILE"]))
        loaded: Any = SimpleNamespace(
            name="paced",
            codec=Codec(),
            max_model_len=CONTEXT,
            vocab_size=len(VOCAB),
            created_at=0,
            info={"engine_thread": threading.get_native_id()},
            chat=Chat(),
            grammars=None,
        )
        served.loaded = loaded
        return Engine(model, NoCache(), scheduler, served.observer)  # type: ignore[arg-type]


if __name__ == "__main__":
    app.service.Service = PacedServer  # type: ignore[misc]
    code = main()
    sys.stderr.flush()
    os._exit(code)
