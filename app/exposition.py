"""What a scrape is answered: all metrics, in the format that it asks for.

Prometheus's text, or OpenMetrics where that is preferred (Accept). Names are the same in both, and
there are no exemplars.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import exposition as text
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def expose(collector: Collector, accepted: Iterable[str]) -> tuple[bytes, str]:
    """The body and its content type. `accepted` are media types with their parameters, the best
    one first; of those that there are not, none counts.

    prometheus_client's own choice fails on versions that are no numbers, and repeats them.
    """
    if _prefers_openmetrics(accepted):
        body: bytes = openmetrics.generate_latest(collector)  # type: ignore[no-untyped-call]
        return body, OPENMETRICS
    return text.generate_latest(collector), TEXT


def _prefers_openmetrics(accepted: Iterable[str]) -> bool:
    for each in accepted:
        kind, *parameters = (part.strip().lower() for part in each.split(";"))
        if kind == "application/openmetrics-text":
            versions = [part[8:] for part in parameters if part.startswith("version=")]
            if versions in ([], ["1.0.0"]):
                return True
        elif kind in ("text/plain", "text/*", "*/*"):
            return False
    return False
