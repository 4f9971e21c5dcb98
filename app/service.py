"""What the routes work with: the server's settings and metrics, and the model that is served.

`_load` runs on the engine thread and imports `loading` there, so that the hub answers health checks
from the first moment.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from gevent.event import Event
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.registry import Collector

from .access import Line
from .bridge import Bridge, State
from .config import Settings, check_folder
from .drain import Drain
from .errors import Draining, NotReady
from .gpu_metrics import GpuMetrics
from .guard import Guard
from .key_ring import KeyRing
from .metric_aliases import Aliased
from .metrics import Metrics
from .quota import Quotas
from .readiness import Readiness
from .served import Served

if TYPE_CHECKING:
    from .engine import Engine
    from .tracing import Tracing

log = logging.getLogger(__name__)


class Service:
    """What stays when the model is switched, and `current`: the model that new requests get.

    `loading` is to become the current one (`switch.py`); those `retiring` were, and still have
    requests; the threads of those `given_up` still load.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tracing = _start_tracing(settings.otlp_traces_endpoint)
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.metrics = Metrics(
            self.registry,
            slow_step_seconds=settings.slow_step_ms / 1000,
            wait_target_seconds=settings.saturation_wait_seconds,
        )
        self.gpu = GpuMetrics(self.registry)
        self.exposed: Collector = self.registry  # what a scrape gets
        if settings.metrics_aliases == "vllm":
            self.exposed = Aliased(self.registry, self._model_name)
        self.ended = Event()  # the current engine has
        self.current = self.prepare(settings)
        self.readiness = Readiness(self.check_ready)
        self.metrics.watch(lambda: self.bridge.backlog, lambda: self.readiness.is_ready)
        self.loading: Served | None = None
        self.retiring: list[Served] = []
        self.given_up: list[Served] = []
        self.is_reload_due = False  # a SIGHUP has come that had to wait
        self.drain = Drain(self, settings.pre_drain_seconds, settings.drain_seconds)
        ring = KeyRing(settings.api_keys, settings.api_keys_file, settings.admin_api_key)
        self.guard = Guard(ring, Quotas())

    def _model_name(self) -> str | None:
        """What answers call the current model; None until that is known."""
        if names := self.current.settings.served_model_name:
            return names[0]
        loaded = self.current.loaded
        return None if loaded is None else loaded.name

    @property
    def bridge(self) -> Bridge:
        return self.current.bridge

    @property
    def state(self) -> State:
        return self.bridge.state

    def prepare(self, settings: Settings) -> Served:
        """The model of these settings; it loads when its bridge is started."""
        served = Served(settings, self.metrics.of_engine(), self._load)
        served.bridge.ended.rawlink(lambda _: self._hear_end(served))
        return served

    def adopt(self, served: Served) -> Served:
        """New requests get it from now on; the one that they got until now, which retires."""
        old, self.current = self.current, served
        self.metrics.current = served.observer
        self.retiring.append(old)
        return old

    def discard(self, served: Served) -> None:
        """It has ended, or never served; waits for its thread."""
        served.close()
        self.metrics.forget(served.observer)
        for known in (self.retiring, self.given_up):
            if served in known:
                known.remove(served)

    def request_stop(self) -> None:
        """Of every engine; `ended` tells when the current one has."""
        loading = [self.loading] if self.loading else []
        for served in (*self.retiring, *loading, self.current):
            served.bridge.request_stop()

    def check_ready(self) -> None:
        """Raises NotReady, with the reason, if no more requests should be sent here."""
        if self.drain.is_announced:
            raise Draining("the server is draining: it ends once its requests are done")
        if (reason := self.bridge.why_not_ready) is not None:
            raise NotReady(reason)

    def _hear_end(self, served: Served) -> None:
        if served is self.current:
            self.ended.set()

    def _load(self, served: Served) -> Engine:
        from .graph import read_graph

        enter = served.bridge.pulse.enter
        started_at = time.monotonic()
        enter("reading the graph")
        check_folder(served.settings)
        graph = read_graph(served.settings.model_path)

        enter("importing libraries")
        from .loading import load  # seconds: a missing file has been told by now

        engine, loaded = load(graph, served.settings, served.observer, enter)
        served.loaded = loaded
        served.observer.loaded(loaded.info)
        if loaded.info["device"] == "cuda":
            self.gpu.watch()
        seconds = round(time.monotonic() - started_at, 1)
        log.info(Line({"message": "loaded", "seconds": seconds} | loaded.info))
        return engine


def _start_tracing(endpoint: str) -> Tracing | None:
    """Without an endpoint nothing of it is imported."""
    if not endpoint:
        return None
    from .tracing import Tracing

    return Tracing(endpoint)
