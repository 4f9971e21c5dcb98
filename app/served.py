"""A model that is served: what a request asks of it, and what its engine's thread makes of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .answer import Answer
from .backlog import Backlog
from .bridge import Bridge, State
from .completion import Completion
from .config import Settings
from .departure import Departure
from .errors import InvalidRequest, NotReady
from .limits import (
    check_logprobs,
    check_min_tokens,
    check_structure,
    check_token_ids,
    resolve_max_tokens,
)
from .metrics import EngineMetrics
from .off_hub import Waiter
from .origin import Origin, read_origin
from .sequence import Constraint, FinishReason, SamplingParams, Sequence

if TYPE_CHECKING:
    from .chat import Rendered
    from .engine import Engine
    from .fields import SamplingFields, Structure
    from .grammar import Grammar
    from .loading import LoadedModel
    from .tools import ToolUse

_LONG_TEXT = 8192  # characters
_LONG_IDS = 8192

# Between the seeds of a prompt's choices: the golden ratio of 2**64, so that seeds that follow
# each other do not share streams.
_SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Ask:
    """What a route asks of the engine: prompts, and what it has read out of the request's fields
    besides those that all routes share."""

    request_id: str
    arrived_at: float  # of `time.monotonic`
    departure: Departure
    prompts: list[list[int]]
    owner: str = ""  # whose request it is, by its API key
    num_logprobs: int | None = None
    prompt_field: str = "prompt"  # what the request calls it, for errors
    max_tokens: int | None = None  # if the request gives it
    max_tokens_field: str = "max_tokens"  # likewise
    default_max_tokens: int | None = None  # None: what the context leaves
    deadline_at: float | None = None
    structure: Structure | None = None
    visible_ids: frozenset[int] = field(default_factory=frozenset)  # control tokens to be shown

    @property
    def waiter(self) -> Waiter:
        return Waiter(self.departure, self.owner, self.deadline_at)


class Served:
    """One model with its engine's thread, and what a request can ask of both.

    A request takes it once (`http.take`) and keeps to it: the server may switch to another model
    at any time.
    """

    def __init__(
        self, settings: Settings, observer: EngineMetrics, load: Callable[[Served], Engine]
    ) -> None:
        """`load` runs on the engine's thread and fills `loaded`."""
        self.settings = settings
        self.observer = observer
        backlog = Backlog(
            settings.max_queued_requests, settings.max_queued_tokens, settings.prefill_chunk
        )
        self.bridge = Bridge(
            partial(self._load, load),
            settings.max_step_seconds,
            backlog,
            settings.max_load_seconds,
        )
        self.loaded: LoadedModel | None = None
        self.origin: Origin | None = None  # what it was loaded from
        self.num_requests = 0  # that have taken it, and may still submit

    @property
    def is_in_use(self) -> bool:
        return self.num_requests > 0 or self.bridge.has_streams

    def close(self) -> None:
        """Its bridge has ended: waits for the thread, and lets go of all that was loaded."""
        self.bridge.close()
        self.loaded = None

    @property
    def model(self) -> LoadedModel:
        """Raises NotReady until the model is loaded and has produced a token.

        Failed steps do not count here: the next request may well succeed.
        """
        if self.loaded is None or self.bridge.state is not State.READY:
            self.bridge.check_served()
            raise NotReady("the model is not loaded")
        return self.loaded

    def check_room(self, owner: str, num_choices: int) -> None:
        """Raises Overloaded, before anything is tokenized, if so many choices are too many."""
        self.bridge.check_room(owner, num_choices, num_choices)  # of a token each, at least

    @property
    def info(self) -> dict[str, Any]:
        """For `/info`: what was loaded, and how much of it may run now. Raises NotReady."""
        info, usage = self.model.info, self.observer.usage
        if usage is None:
            return info
        return info | {
            "batch_limit": usage.batch_limit,
            "batch_limit_reason": usage.why_limited,
            "kv_cache_slots": usage.size.num_slots,
            "kv_cache_slot_tokens": usage.size.max_len,
            "kv_cache_tokens": usage.num_tokens,
            "kv_budget_bytes": usage.budget,
        }

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a request may call the model; the first one is what answers call it."""
        return self.settings.served_model_name or (self.model.name,)

    def encode(
        self,
        texts: list[str],
        *,
        parse_special: bool = False,
        prefix: bool | None = None,
        waiter: Waiter | None = None,
    ) -> list[list[int]]:
        """Token ids of each text. Long ones take long: not on the hub, where they would stall every
        stream. Raises what `off_hub.run` does."""
        encode = partial(self.model.codec.encode, parse_special=parse_special, prefix=prefix)

        def work() -> list[list[int]]:
            return [encode(text) for text in texts]

        is_long = sum(map(len, texts)) > _LONG_TEXT
        return self.bridge.off_hub(work, "text", waiter) if is_long else work()

    def decode(self, token_ids: list[int], waiter: Waiter | None = None) -> str:
        """Likewise the text of token ids, control tokens written out."""
        work = partial(self.model.codec.decode, token_ids)
        is_long = len(token_ids) > _LONG_IDS
        return self.bridge.off_hub(work, "text", waiter) if is_long else work()

    def submit(self, fields: SamplingFields, ask: Ask) -> Answer:
        """Queues a sequence for each choice of each prompt, choices of a prompt side by side.

        Raises InvalidRequest if one does not fit, DeadlineExceeded if its grammar takes too long,
        ClientLeft if nobody waits for it any more, Overloaded if too much waits already. A client
        that leaves later ends its answer.
        """
        ask.departure.check()  # its prompt may have been tokenized on another thread
        codec = self.model.codec
        check_token_ids(fields, self.model.vocab_size)
        constrain: Callable[[], Constraint] | None = None
        if ask.structure is not None:
            check_structure(fields, ask.structure.field, is_free=ask.structure.is_free)
            constrain = self.compile(ask.structure, ask.waiter).constraint
        params = fields.params(1, ask.num_logprobs)  # but for what each prompt or choice has
        sequences = [
            sequence
            for prompt_ids in ask.prompts
            for sequence in self._choices(fields, params, ask, prompt_ids, constrain)
        ]
        ask.departure.check()  # likewise a grammar, compiled
        streams, arrival = self.bridge.submit(sequences)
        try:
            completions = [
                Completion(stream, codec.detokenizer(ask.visible_ids), fields.stop_strings)
                for stream in streams
            ]
            answer = Answer(ask.request_id, completions, arrival, ask.deadline_at)
            ask.departure.call(answer.leave)
        except BaseException:
            for stream in streams:  # the engine has them already
                stream.end(FinishReason.ABORT)
            raise
        return answer

    def render(
        self, messages: list[dict[str, Any]], use: ToolUse | None, waiter: Waiter | None = None
    ) -> Rendered:
        """A conversation by the model's chat template. Raises InvalidRequest, and what
        `off_hub.run` does."""
        tools = [tool.shown() for tool in use.tools] if use else None
        # Templates are programs, and run several times: never on the hub.
        work = partial(self.model.chat.render, messages, tools)
        return self.bridge.off_hub(work, "template", waiter)

    def compile(self, structure: Structure, waiter: Waiter) -> Grammar:
        """Raises InvalidRequest for a grammar that cannot be compiled, and what `off_hub.run`
        does."""
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
        work = partial(compilers[structure.kind], structure.source, structure.field)
        return self.bridge.off_hub(work, "grammar", waiter)

    def _load(self, load: Callable[[Served], Engine]) -> Engine:
        # First: what changes while it is read has changed.
        self.origin = read_origin(self.settings.model_path)
        return load(self)

    def _choices(
        self,
        fields: SamplingFields,
        params: SamplingParams,
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
        params = replace(params, max_tokens=max_tokens)
        seed = fields.first_seed()
        return [
            Sequence(
                ask.request_id,
                prompt_ids,
                replace(params, seed=(seed + choice * _SEED_STRIDE) % 2**64),
                constraint=constrain() if constrain else None,
                arrived_at=ask.arrived_at,
                owner=ask.owner,
                priority=fields.priority or 0,
            )
            for choice in range(fields.num_choices)
        ]
