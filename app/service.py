"""What the routes work with: settings, metrics, the bridge and, once loaded, the model's text side.

`_load` runs on the engine thread and imports `loading` there, so that the hub answers health checks
from the first moment.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from .bridge import Bridge, State
from .completion import Answer, Completion
from .config import Settings
from .errors import InvalidRequest, NotReady
from .metrics import Metrics
from .protocol import GenerateRequest, resolve_max_tokens
from .sequence import Sequence

if TYPE_CHECKING:
    from .engine import Engine
    from .loading import LoadedModel

log = logging.getLogger(__name__)

_LONG_PROMPT = 8192  # characters


class Service:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.bridge = Bridge(self._load)
        self._model: LoadedModel | None = None

    @property
    def model(self) -> LoadedModel:
        """Raises NotReady until the model is loaded and has produced a token.

        Failed steps do not count here: the next request may well succeed.
        """
        if self._model is None or self.bridge.state is not State.READY:
            raise NotReady(self.bridge.why_not_ready)
        return self._model

    def submit(self, request: GenerateRequest) -> Answer:
        """Tokenizes and queues a request. Raises InvalidRequest if it does not fit."""
        model, arrived_at = self.model, time.monotonic()
        # A long prompt takes long to tokenize: not on the hub, where it would stall every stream.
        encode, text, raw = model.codec.encode, request.prompt, request.parse_special
        if len(text) > _LONG_PROMPT:
            prompt_ids = self.bridge.off_hub(encode, text, parse_special=raw)
        else:
            prompt_ids = encode(text, parse_special=raw)
        if not prompt_ids:
            raise InvalidRequest("prompt: it has no tokens", param="prompt")
        max_tokens = resolve_max_tokens(request, len(prompt_ids), model.max_model_len)
        sequence = Sequence(
            request_id=f"gen-{uuid.uuid4().hex}",
            prompt_ids=prompt_ids,
            params=request.sampling_params(max_tokens),
            arrived_at=arrived_at,
        )
        streams, arrival = self.bridge.submit([sequence])
        completions = [Completion(stream, model.codec.detokenizer()) for stream in streams]
        return Answer(completions, arrival)

    def _load(self) -> Engine:
        from .graph import read_graph

        started_at = time.monotonic()
        graph = read_graph(self.settings.model_path)

        from .loading import load  # seconds: a missing file has been told by now

        engine, self._model = load(graph, self.settings, self.metrics)
        log.info("loaded %s in %.1f s", self._model.info, time.monotonic() - started_at)
        return engine
