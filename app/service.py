"""What the routes work with: settings, metrics, the bridge and, once loaded, the model's text side.

`_load` runs on the engine thread and imports `loading` there, so that the hub answers health checks
from the first moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from .bridge import Bridge, State
from .completion import Answer, Completion
from .config import Settings
from .drain import Drain
from .errors import Draining, InvalidRequest, NotReady
from .limits import (
    check_logprobs,
    check_min_tokens,
    check_structure,
    check_token_ids,
    resolve_max_tokens,
)
from .metrics import Metrics
from .sequence import Constraint, Sequence

if TYPE_CHECKING:
    from .chat import Rendered
    from .engine import Engine
    from .fields import SamplingFields, Structure
    from .grammar import Grammar
    from .loading import LoadedModel
    from .tools import ToolUse

log = logging.getLogger(__name__)

_LONG_TEXT = 8192  # characters

# Between the seeds of a prompt's choices: the golden ratio of 2**64, so that seeds that follow
# each other do not share streams.
_SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Ask:
    """What a route asks of the engine: prompts, and what it has read out of the request's fields
    besides those that all routes share."""

    request_id: str
    arrived_at: float  # of `time.monotonic`
    prompts: list[list[int]]
    num_logprobs: int | None = None
    prompt_field: str = "prompt"  # what the request calls it, for errors
    max_tokens: int | None = None  # if the request gives it
    max_tokens_field: str = "max_tokens"  # likewise
    default_max_tokens: int | None = None  # None: what the context leaves
    deadline_at: float | None = None
    structure: Structure | None = None
    visible_ids: frozenset[int] = field(default_factory=frozenset)  # control tokens to be shown


class Service:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.bridge = Bridge(self._load, settings.max_step_seconds)
        self.drain = Drain(self.bridge, settings.pre_drain_seconds, settings.drain_seconds)
        self._model: LoadedModel | None = None

    @property
    def model(self) -> LoadedModel:
        """Raises NotReady until the model is loaded and has produced a token.

        Failed steps do not count here: the next request may well succeed.
        """
        if self._model is None or self.bridge.state is not State.READY:
            raise NotReady(self.bridge.why_not_served or "the model is not loaded")
        return self._model

    def check_ready(self) -> None:
        """Raises NotReady, with the reason, if no more requests should be sent here."""
        if self.drain.is_announced:
            raise Draining("the server is draining: it ends once its requests are done")
        if (reason := self.bridge.why_not_ready) is not None:
            raise NotReady(reason)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a request may call the model; the first one is what answers call it."""
        return self.settings.served_model_name or (self.model.name,)

    def encode(
        self, text: str, *, parse_special: bool = False, prefix: bool | None = None
    ) -> list[int]:
        """Token ids of a text. A long one takes long: not on the hub, where it would stall every
        stream."""
        encode = self.model.codec.encode
        if len(text) > _LONG_TEXT:
            return self.bridge.off_hub(encode, text, parse_special=parse_special, prefix=prefix)
        return encode(text, parse_special=parse_special, prefix=prefix)

    def submit(self, fields: SamplingFields, ask: Ask) -> Answer:
        """Queues a sequence for each choice of each prompt, choices of a prompt side by side.

        Raises InvalidRequest if one does not fit.
        """
        codec = self.model.codec
        check_token_ids(fields, self.model.vocab_size)
        constrain = self._compile(fields, ask.structure) if ask.structure else None
        sequences = [
            sequence
            for prompt_ids in ask.prompts
            for sequence in self._choices(fields, ask, prompt_ids, constrain)
        ]
        streams, arrival = self.bridge.submit(sequences)
        completions = [
            Completion(stream, codec.detokenizer(ask.visible_ids), fields.stop_strings)
            for stream in streams
        ]
        return Answer(ask.request_id, completions, arrival, ask.deadline_at)

    def render(self, messages: list[dict[str, Any]], use: ToolUse | None) -> Rendered:
        """A conversation by the model's chat template. Raises InvalidRequest."""
        tools = [tool.shown() for tool in use.tools] if use else None
        # Templates are programs, and run several times: never on the hub.
        return self.bridge.off_hub(self.model.chat.render, messages, tools)

    def _compile(self, fields: SamplingFields, structure: Structure) -> Callable[[], Constraint]:
        """Raises InvalidRequest for a grammar that cannot be compiled."""
        check_structure(fields, structure.field, is_free=structure.is_free)
        grammars = self.model.grammars
        if grammars is None:
            raise InvalidRequest(
                f"{structure.field}: answers cannot be held to a form with this model's tokenizer",
                param=structure.field,
            )
        compilers: dict[str, Callable[[Any, str], Grammar]] = {
            "json_schema": grammars.json_schema,
            "regex": grammars.regex,
            "lark": grammars.lark,
            "tools": grammars.tools,
        }
        compile_ = compilers[structure.kind]
        return self.bridge.off_hub(compile_, structure.source, structure.field).constraint

    def _choices(
        self,
        fields: SamplingFields,
        ask: Ask,
        prompt_ids: list[int],
        constrain: Callable[[], Constraint] | None,
    ) -> list[Sequence]:
        max_tokens = resolve_max_tokens(
            ask.max_tokens,
            ask.default_max_tokens,
            len(prompt_ids),
            self.model.max_model_len,
            prompt_field=ask.prompt_field,
            max_tokens_field=ask.max_tokens_field,
        )
        check_min_tokens(fields.min_tokens, max_tokens)
        check_logprobs(len(ask.prompts) * fields.num_choices, max_tokens, ask.num_logprobs)
        params = fields.params(max_tokens, ask.num_logprobs)
        return [
            Sequence(
                ask.request_id,
                prompt_ids,
                replace(params, seed=(params.seed + choice * _SEED_STRIDE) % 2**64),
                constraint=constrain() if constrain else None,
                arrived_at=ask.arrived_at,
            )
            for choice in range(fields.num_choices)
        ]

    def _load(self) -> Engine:
        from .graph import read_graph

        enter = self.bridge.pulse.enter
        started_at = time.monotonic()
        enter("reading the graph")
        graph = read_graph(self.settings.model_path)

        enter("importing libraries")
        from .loading import load  # seconds: a missing file has been told by now

        engine, self._model = load(graph, self.settings, self.metrics, enter)
        log.info("loaded %s in %.1f s", self._model.info, time.monotonic() - started_at)
        return engine
