"""Our engine inside a decoupled model of Triton's python backend: all that its `model.py` calls.

Three threads: Triton's brings requests and never waits for an answer, the engine's steps, and a
third turns what steps brought into responses (`triton_answer`). All requests share the engine's
batch, as those of our own server do, and are held to the same rules (`triton_requests`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from .backlog import Backlog
from .completion import Completion
from .config import Settings, check_folder
from .engine_thread import EngineThread, State
from .errors import ClientLeft, Draining, ModelFailure, NotReady, ServeError, UnservableModel
from .limits import deadline
from .logs import set_up
from .machine import available_cpus, limit_threads, quiet_libraries
from .metrics import Metrics
from .pulse import Pulse
from .sequence import Advance, Sequence
from .triton_answer import Arrivals, Responses, TritonAnswer
from .triton_intake import make_sequence
from .triton_metrics import TritonMetrics
from .triton_requests import read_inputs
from .triton_settings import read_parameters

if TYPE_CHECKING:
    from .engine import Engine
    from .loading import LoadedModel

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 0.25  # between looks at those that get no tokens: has their client left?
_METRICS_SECONDS = 1.0
_STOP_SECONDS = 20.0
CANCEL = "cancel"  # an input: the request of that id ends


class Backend:
    """`initialize`, `execute` and `finalize` of one model. `pb_utils` is Triton's library."""

    def __init__(self, pb_utils: Any, args: dict[str, str]) -> None:
        """Returns once the model has made a token. Raises UnservableModel, saying why not."""
        quiet_libraries()
        self._pb_utils = pb_utils
        self._settings = settings = read_parameters(args)
        set_up(settings.log_level, settings.log_format)
        limit_threads(settings.threads or available_cpus())
        registry = CollectorRegistry()
        self._metrics = Metrics(
            registry,
            slow_step_seconds=settings.slow_step_ms / 1000,
            wait_target_seconds=settings.saturation_wait_seconds,
        )
        self._observer = self._metrics.of_engine()
        self._told_metrics = TritonMetrics(pb_utils, registry)
        self._backlog = _backlog(settings)
        self._metrics.watch(lambda: self._backlog, lambda: self._why_not is None)
        self._pulse = Pulse(settings.max_step_seconds)
        self._posted: queue.SimpleQueue[list[Advance] | State] = queue.SimpleQueue()
        self._state = State.LOADING
        self._loaded: LoadedModel | None = None
        self._open: dict[Sequence, TritonAnswer] = {}
        self._engine = EngineThread(self._load, self._posted.put, self._pulse, self._backlog)
        self._engine.start()
        self._state = self._wait_loaded()
        self._delivery = threading.Thread(target=self._deliver, name="delivery", daemon=True)
        self._delivery.start()

    def execute(self, requests: list[Any]) -> None:
        """Takes each, or refuses it at once; answers come later."""
        for request in requests:
            responses = Responses(self._pb_utils, request.get_response_sender())
            try:
                self._take(request, responses)
            except Exception as error:
                _last_word(responses.fail, self._told(error))

    def close(self) -> None:
        """Ends what is open, and the engine. Triton has waited for open requests before."""
        self._state = State.STOPPED
        self._engine.stop()
        self._engine.join(_STOP_SECONDS)
        self._posted.put(State.STOPPED)
        self._delivery.join(_STOP_SECONDS)

    # --- on the engine's thread -------------------------------------------------------------------

    def _load(self) -> Engine:
        from .graph import read_graph

        enter, settings = self._pulse.enter, self._settings
        enter("reading the graph")
        check_folder(settings)
        graph = read_graph(settings.model_path)
        enter("importing libraries")
        from .loading import load

        engine, self._loaded = load(graph, settings, self._observer, enter)
        self._observer.loaded(self._loaded.info)
        return engine

    def _wait_loaded(self) -> State:
        limit = self._settings.max_load_seconds or None
        try:
            state = self._posted.get(timeout=limit)
        except queue.Empty:
            raise UnservableModel(
                f"the load takes more than {limit} s; {self._pulse.stage}"
            ) from None
        if state is not State.READY:
            raise UnservableModel(f"the model cannot be served: {self._engine.failure}")
        return State.READY

    # --- on Triton's thread -----------------------------------------------------------------------

    @property
    def _is_serving(self) -> bool:
        return self._state is State.READY

    @property
    def _why_not(self) -> str | None:
        if not self._is_serving:
            return f"the model is {self._state.value}"
        if (seconds := self._pulse.stalled_seconds) is not None:
            return f"the model hangs: no progress for {seconds:.0f} s"
        return None

    def _take(self, request: Any, responses: Responses) -> None:
        tensors = [(each.name(), each.as_numpy()) for each in request.inputs()]
        if any(name == CANCEL for name, _ in tensors):
            self._cancel(request.request_id(), responses)
            return
        arrived_at = time.monotonic()
        if (why := self._why_not) is not None:
            raise NotReady(why)
        self._backlog.check("", 1, 1)  # before anything is tokenized
        asked = read_inputs(tensors)
        limit = self._settings.max_timeout_ms
        deadline_at = deadline(asked.timeout_ms, None, limit, arrived_at)
        assert self._loaded is not None, "it is ready"
        request_id = request.request_id() or uuid.uuid4().hex
        sequence = make_sequence(asked, self._loaded, request_id, arrived_at)
        arrivals = Arrivals(sequence, self._engine.end)
        detokenizer = self._loaded.codec.detokenizer()
        answer = TritonAnswer(
            *(responses, arrivals, Completion(arrivals, detokenizer, asked.stop_strings)),
            is_streamed=bool(asked.stream),
            deadline_at=deadline_at,
        )
        self._backlog.check("", 1, len(sequence.prompt_ids))
        self._backlog.add([sequence])
        self._open[sequence] = answer
        if not self._is_serving and self._open.pop(sequence, None) is not None:
            raise NotReady("the model has stopped")  # all that was open before has been told
        self._engine.submit(sequence)

    def _cancel(self, request_id: str, responses: Responses) -> None:
        """The open requests of that id, if there are any, end before the next step."""
        for answer in list(self._open.values()):
            if answer.sequence.request_id == request_id:
                answer.leave()
        responses.send(is_last=True, text_output="")

    def _told(self, error: Exception) -> ServeError:
        """What a client hears of it; of an error that nobody foresaw, nothing more than that."""
        if not isinstance(error, ServeError):
            log.exception("a request has failed", exc_info=error)
            error = ServeError("the server failed on this request")
        if not isinstance(error, ClientLeft):
            self._metrics.rejected(error.code)
        return error

    # --- on the delivering thread -----------------------------------------------------------------

    def _deliver(self) -> None:
        sweep_at = metrics_at = 0.0
        while True:
            touched = self._hand_out()
            if not self._is_serving:
                break
            now = time.monotonic()
            if now >= sweep_at:
                sweep_at, touched = now + _SWEEP_SECONDS, list(self._open.values())
            for answer in touched:
                self._go_on(answer)
            if now >= metrics_at:
                metrics_at = now + _METRICS_SECONDS
                self._tell_metrics()
        self._end_all()
        if self._state is State.FAILED:  # Triton goes on, and would say for ever that it is ready
            self._tell_metrics()

    def _hand_out(self) -> list[TritonAnswer]:
        """Waits for a step's advances, a moment at most; the answers that have got some. What has
        come meanwhile comes along: where delivery is slower than the steps, texts grow."""
        touched: dict[TritonAnswer, None] = {}
        try:
            item = self._posted.get(timeout=_SWEEP_SECONDS)
            while True:
                if isinstance(item, State):
                    self._state = item if item is State.FAILED else State.STOPPED
                    break
                for advance in item:
                    if (answer := self._open.get(advance.sequence)) is not None:
                        answer.arrivals.put(advance)
                        touched[answer] = None
                item = self._posted.get_nowait()
        except queue.Empty:
            pass
        return list(touched)

    def _go_on(self, answer: TritonAnswer) -> None:
        try:
            answer.go_on()
        except Exception as error:
            _last_word(answer.fail, self._told(error))
        if answer.has_ended:
            self._open.pop(answer.sequence, None)

    def _tell_metrics(self) -> None:
        try:
            self._told_metrics.update()
        except Exception:  # who only counts costs nobody an answer
            log.exception("the metrics cannot be told")

    def _end_all(self) -> None:
        error: ServeError = Draining("the server has stopped")
        if self._state is State.FAILED:
            error = ModelFailure("the engine has failed")
        while self._open:
            _, answer = self._open.popitem()
            _last_word(answer.fail, error)


def _last_word(say: Callable[[ServeError], None], error: ServeError) -> None:
    """Nobody can be told if that fails."""
    try:
        say(error)
    except Exception:
        log.exception("an error could not be told")


def _backlog(settings: Settings) -> Backlog:
    return Backlog(settings.max_queued_requests, settings.max_queued_tokens, settings.prefill_chunk)
