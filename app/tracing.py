"""Spans by OpenTelemetry, one for each request that carries work, made when its answer has ended.

The only module that imports OpenTelemetry, and imported only if OTLP_TRACES_ENDPOINT is set. Spans
are sent by the SDK's own thread. No text of a request or an answer is in them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .config import VERSION
from .routes import ROUTES
from .traced import Traced

if TYPE_CHECKING:
    from .answer import Answer

log = logging.getLogger(__name__)

_TOLD_SECONDS = 60.0
FLUSH_SECONDS = 1.5  # at the end, for what has not been sent yet
_MAX_TEXT = 512
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
}
_WORK = frozenset(route.path for route in ROUTES if route.method == "POST")
_CLIENT_LEFT = 499
_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class Seldom(logging.Filter):
    """Lets each message through once a minute: a collector that is away is no news each second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._told_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, template = self._clock(), str(record.msg)
        if now - self._told_at.get(template, -_TOLD_SECONDS) < _TOLD_SECONDS:
            return False
        self._told_at[template] = now
        return True


class Tracing:
    """Sends spans to `endpoint`. Queue, batches, sampling, headers and resource are what the SDK's
    own variables (`OTEL_…`) say."""

    def __init__(self, endpoint: str) -> None:
        logging.getLogger(_EXPORTER_LOG).addFilter(Seldom())
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("phi-serve", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def tell(
        self, line: dict[str, Any], fields: Iterable[tuple[str, str]], traced: Traced
    ) -> str | None:
        """A span of a request that has ended now; the id of its trace, None if there is none.

        `line` is what the access log says of it, `fields` the request's header lines, names in
        lower case. Whatever fails here is logged and harms no request.
        """
        try:
            return self._tell(line, fields, traced)
        except Exception:
            log.exception("request %s has no span", line["request_id"])
            return None

    def close(self) -> None:
        """Sends what is left, for a moment: a collector that does not answer is not waited for."""
        thread = threading.Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        thread.start()
        thread.join(FLUSH_SECONDS)
        if thread.is_alive():
            log.warning("spans are lost: they could not be sent within %s s", FLUSH_SECONDS)
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # it tries no more

    def _tell(
        self, line: dict[str, Any], fields: Iterable[tuple[str, str]], traced: Traced
    ) -> str | None:
        now, now_ns = time.monotonic(), time.time_ns()
        route = line["path"] if line["path"] in _WORK else None
        span = self._tracer.start_span(
            f"POST {route}" if route else "POST",
            self._propagator.extract(_carrier(fields)),
            SpanKind.SERVER,
            start_time=now_ns - _nanoseconds(line["seconds"]),
        )
        context = span.get_span_context()
        if span.is_recording():
            span.set_attributes(dict(_of_http(line, route)) | dict(_of_model(line, route, traced)))
            if traced.answer is not None:
                for name, began_at, seconds in phases(traced.answer, now):
                    at = now_ns - _nanoseconds(now - began_at)
                    span.add_event(name, {"seconds": round(seconds, 6)}, at)
            if is_failure(line):
                span.set_status(StatusCode.ERROR, _error(line))
        span.end(now_ns)
        return f"{context.trace_id:032x}" if context.is_valid else None


def phases(answer: Answer, now: float) -> Iterator[tuple[str, float, float]]:
    """Queue, prefill, decode: name, when it began, of `time.monotonic`, and its seconds, until
    `now` for the one that the request ended in. Of several choices the earliest counts, and the
    last token of all."""
    sequences = [completion.sequence for completion in answer.completions]
    admitted = _least(sequence.admitted_at for sequence in sequences)
    first = _least(sequence.first_token_at for sequence in sequences)
    ends = [at for sequence in sequences if (at := sequence.last_token_at) is not None]
    last = max(ends, default=None)
    began_at = sequences[0].arrived_at
    for name, ended_at in (("queue", admitted), ("prefill", first), ("decode", last)):
        yield name, began_at, max(0.0, (now if ended_at is None else ended_at) - began_at)
        if ended_at is None:
            return
        began_at = ended_at


def is_failure(line: dict[str, Any]) -> bool:
    """The server failed, or the client left, or an error came in mid-stream; a request that was
    refused (4xx) is no failure of the server's, by the conventions for HTTP."""
    status = line["status"]
    return status >= 500 or status == _CLIENT_LEFT or (status < 400 and _error(line) is not None)


def _error(line: dict[str, Any]) -> str | None:
    if line["status"] == _CLIENT_LEFT:
        return "client_left"
    code = line["note"].get("error")
    return str(code) if code else None


def _of_http(line: dict[str, Any], route: str | None) -> Iterator[tuple[str, Any]]:
    yield "http.request.method", line["method"]
    yield "url.scheme", "http"
    yield "url.path", (line["path"] or "")[:_MAX_TEXT]
    yield "http.response.status_code", line["status"]
    yield "phi_serve.request_id", line["request_id"]
    optional = {"http.route": route, "client.address": line["client"], "error.type": _error(line)}
    yield from _given(optional)


def _of_model(line: dict[str, Any], route: str | None, traced: Traced) -> Iterator[tuple[str, Any]]:
    """By the conventions for generative AI."""
    if route not in _OPERATIONS:
        return
    note, model = line["note"], traced.model or traced.served_model
    yield "gen_ai.operation.name", _OPERATIONS[route]
    yield "gen_ai.provider.name", "phi_serve"
    yield "gen_ai.request.stream", traced.is_stream
    yield from _given(
        {
            "gen_ai.request.model": model[:_MAX_TEXT] if model else None,
            "gen_ai.response.model": traced.served_model,
            "gen_ai.usage.input_tokens": note.get("prompt_tokens"),
            "gen_ai.usage.cache_read.input_tokens": note.get("cached_tokens"),
            "gen_ai.usage.output_tokens": note.get("completion_tokens"),
        }
    )
    if traced.answer is not None:
        yield from _of_answer(traced.answer, is_stream=traced.is_stream)


def _of_answer(answer: Answer, *, is_stream: bool) -> Iterator[tuple[str, Any]]:
    sequences = [completion.sequence for completion in answer.completions]
    params = sequences[0].params
    for name in ("max_tokens", "temperature", "top_p", "top_k"):
        yield f"gen_ai.request.{name}", getattr(params, name)
    if (count := len(sequences)) > 1:
        yield "gen_ai.request.choice.count", count
    if is_stream and (first := _least(each.first_token_at for each in sequences)) is not None:
        yield "gen_ai.response.time_to_first_chunk", first - sequences[0].arrived_at
    reasons = [str(c.finish_reason) for c in answer.completions if c.finish_reason]
    yield "gen_ai.response.finish_reasons", reasons
    if preemptions := sum(each.num_preemptions for each in sequences):
        yield "phi_serve.num_preemptions", preemptions


def _carrier(fields: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """What the propagator reads; two `traceparent` are none, as W3C has it."""
    carrier: dict[str, list[str]] = {}
    for name, value in fields:
        if name in ("traceparent", "tracestate"):
            carrier.setdefault(name, []).append(value)
    return carrier if len(carrier.get("traceparent", ())) == 1 else {}


def _resource() -> Resource:
    """Ours, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` say otherwise."""
    own = Resource({"service.name": "phi-serve", "service.version": VERSION})
    return Resource.create().merge(own).merge(OTELResourceDetector().detect())


def _given(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in attributes.items() if value is not None)


def _least(instants: Iterable[float | None]) -> float | None:
    return min((at for at in instants if at is not None), default=None)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
