"""Settings of tracing: where spans go.

They are options as `config.py`'s are, and fields of its `Settings`.
"""

from __future__ import annotations

from importlib import import_module
from urllib.parse import urlsplit

import click

from .edge_options import option

_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def _endpoint(_: click.Context, __: click.Parameter, value: str) -> str:
    """Without one nothing of OpenTelemetry is imported."""
    if not value:
        return ""
    try:
        parts = urlsplit(value)
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or parts.path in ("", "/"):
        raise click.BadParameter(
            f"{value!r:.200} is no address with a path, such as http://collector:4318/v1/traces."
        )
    try:
        for name in _NEEDED:
            import_module(name)
    except ImportError as error:
        raise click.BadParameter(
            "tracing needs the packages of requirements-tracing.txt, and not all are there "
            f"({error}): pip install -r requirements-tracing.txt"
        ) from None
    return value


TRACING_OPTIONS: list[click.Parameter] = [
    option(
        "otlp_traces_endpoint",
        "Address that takes spans by OTLP over HTTP, such as `http://collector:4318/v1/traces`; "
        "empty turns tracing off.",
        "",
        callback=_endpoint,
    ),
]
