"""Settings of the socket side: how much and how long a connection may take, and what is logged.

They are options as `config.py`'s are, and fields of its `Settings`.
"""

from __future__ import annotations

from typing import Any

import click

_DAY_MS = 86_400_000


def option(name: str, help_: str, default: float | str, **attributes: Any) -> click.Option:
    """With the flag and the variable that its name asks for."""
    return click.Option(
        [f"--{name.replace('_', '-')}", name],
        envvar=name.upper(),
        help=help_,
        show_default=True,
        show_envvar=True,
        default=default,
        **attributes,
    )


def number(name: str, help_: str, default: int, low: int, high: int | None = None) -> click.Option:
    return option(name, help_, default, type=click.IntRange(low, high))


EDGE_OPTIONS: list[click.Parameter] = [
    number(
        "max_connections",
        "Most open connections; over it, requests for other than health and metrics get a 503.",
        *(8192, 1, 1_000_000),
    ),
    number(
        "reserved_connections",
        "Connections beyond that which are accepted to answer health and metrics.",
        *(32, 1, 10_000),
    ),
    number("max_request_line", "Most bytes of a request line.", 8192, 16, 1 << 20),
    number("max_header_bytes", "Most bytes of a request's header lines.", 32768, 16, 1 << 24),
    number("max_headers", "Most header lines of a request.", 100, 1, 10_000),
    number("max_json_depth", "Most objects and arrays within each other in a body.", 100, 1, 1000),
    number(
        "keepalive_timeout_ms",
        "Milliseconds that a connection may lie idle between requests.",
        *(75_000, 1, _DAY_MS),
    ),
    number(
        "header_timeout_ms",
        "Milliseconds from a request's first byte to the end of its headers; also until the first "
        "byte of a new connection.",
        *(10_000, 1, _DAY_MS),
    ),
    number("read_timeout_ms", "Milliseconds between the bytes of a body.", 10_000, 1, _DAY_MS),
    number("body_timeout_ms", "Milliseconds for a whole body.", 60_000, 1, _DAY_MS),
    number(
        "write_timeout_ms",
        "Milliseconds in which a client must take what is sent to it, 64 KiB at a time.",
        *(30_000, 1, _DAY_MS),
    ),
    number(
        "tcp_user_timeout_ms",
        "Milliseconds after which a peer that acknowledges nothing counts as vanished.",
        *(30_000, 1000, _DAY_MS),
    ),
    number(
        "ops_port",
        "Port of their own for health and metrics, which `PORT` then does not serve; 0 is none.",
        *(0, 0, 65535),
    ),
    option("ops_host", "Address of that port; empty takes `HOST`.", ""),
    option(
        "log_format",
        "`json`: each message is one line of JSON.",
        "json",
        type=click.Choice(["json", "text"]),
    ),
]
