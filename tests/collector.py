"""A receiver of OTLP over HTTP, as a tracing backend has one. Use as a context manager."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from .live import wait_for

PATH = "/v1/traces"


class Span:
    """One span, in plain types."""

    def __init__(self, proto: Any, resource: dict[str, Any]) -> None:
        self.name, self.resource = proto.name, resource
        self.kind, self.status = int(proto.kind), int(proto.status.code)
        self.trace_id, self.parent_id = proto.trace_id.hex(), proto.parent_span_id.hex()
        self.began_at, self.ended_at = proto.start_time_unix_nano, proto.end_time_unix_nano
        self.attributes = _plain(proto.attributes)
        self.events = [(e.name, e.time_unix_nano, _plain(e.attributes)) for e in proto.events]


class Collector:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                is_right = self.path == PATH
                if is_right:
                    outer.bodies.append(body)
                reply = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if is_right else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.server_port}{PATH}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def spans(self) -> list[Span]:
        found = []
        for body in list(self.bodies):
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = _plain(group.resource.attributes)
                found += [Span(s, resource) for scope in group.scope_spans for s in scope.spans]
        return found

    def span(self, request_id: str) -> Span:
        """Of that request; waits for it. There must be one only."""

        def find() -> list[Span]:
            key = "phi_serve.request_id"
            return [span for span in self.spans if span.attributes.get(key) == request_id]

        [span] = wait_for(find, f"the span of {request_id}")
        assert isinstance(span, Span)
        return span


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
