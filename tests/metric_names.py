"""Which metrics PromQL and YAML name, and which there are: so that no file under deploy/ names one
that nobody writes.

A name with a colon is a recording rule's and must be recorded; GPU metrics are absent on a machine
without one, so they are known by name, here alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client.parser import text_string_to_metric_families

from .test_drain import stub_server

GPU_METRICS = frozenset(
    f"phi_serve_gpu_{name}"
    for name in ("utilization_ratio", "memory_used_bytes", "memory_free_bytes")
)
# Prometheus writes these itself.
PROMETHEUS_OWN = frozenset({"up", "ALERTS", "ALERTS_FOR_STATE", "scrape_duration_seconds"})

_STRING = re.compile(r'"(?:\\.|[^"\\])*"' + r"|'(?:\\.|[^'\\])*'")
_BRACES = re.compile(r"\{[^{}]*\}|\[[^\[\]]*\]")
_LABEL_LIST = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")
_IDENTIFIER = re.compile(r"(?<![\w:.$])[a-zA-Z_:][\w:]*(?!\s*\()(?![\w:])")
_WORDS = frozenset(
    [
        *("and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring"),
        *("group_left", "group_right", "inf", "nan"),
    ]
)


def metrics_of(expression: str) -> set[str]:
    """All metrics that a PromQL expression reads, recording rules' included."""
    bare = _BRACES.sub(" ", _STRING.sub('""', expression))
    names = set(_IDENTIFIER.findall(_LABEL_LIST.sub(" ", bare)))
    return {name for name in names if name.lower() not in _WORDS}


def selectors_of(expression: str) -> Iterator[tuple[str, str, str, str]]:
    """Metric, label, operator and value of each matcher in an expression."""
    for metric, matchers in re.findall(r"([a-zA-Z_:][\w:]*)\s*\{([^{}]*)\}", expression):
        for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers):
            yield metric, label, operator, value


def our_names_in(text: str) -> set[str]:
    """All that begins as our metrics do, anywhere in a file: comments and texts, too."""
    return set(re.findall(r"(?<![\w:])phi_serve_\w+(?![\w:])", text))


def served(scrape: str) -> dict[str, list[dict[str, str]]]:
    """What a text of `/metrics` has: by the name of each sample, the labels of all of them."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(scrape):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def unknown(names: set[str], scrape: str, recorded: Iterable[str] = ()) -> set[str]:
    """Those of `names` that neither the scrape, a GPU, Prometheus nor a recording rule has."""
    return names - served(scrape).keys() - GPU_METRICS - PROMETHEUS_OWN - set(recorded)


@cache
def real_scrape() -> str:
    """`/metrics` of a server process with a stub model, over HTTP, once it has answered. One with a
    real model is held against the same files in test_prometheus_live.py."""
    with TemporaryDirectory() as folder, stub_server(Path(folder) / "model", 2) as server:
        server.wait_ready().generate("all that there is", max_tokens=4)
        return server.get("/metrics").text
