"""Settings of the KV cache: how much memory it may take, for how long, and what it keeps.

They are options as `config.py`'s are, and fields of its `Settings`.
"""

from __future__ import annotations

import math

import click

from .edge_options import number, option


def _number(_: click.Context, __: click.Parameter, value: float) -> float:
    if math.isnan(value):  # which is neither below a bound nor above it
        raise click.BadParameter(f"{value} is no number.")
    return value


CACHE_OPTIONS: list[click.Parameter] = [
    option(
        "kv_memory_share",
        "Share of the free memory that the KV cache may take, once the weights are loaded; its own "
        "counts as free. The rest is for the model's workspace, and for others.",
        0.8,
        type=click.FloatRange(0.05, 0.95),
        callback=_number,
    ),
    number(
        "kv_idle_seconds",
        "Seconds without requests after which the KV cache gives its memory back; 0: never.",
        *(60, 0, 86_400),
    ),
    option(
        "prefix_cache",
        "Keep the keys of requests that have ended until their row is needed: a prompt of the same "
        "API key that begins likewise is not read again that far. Not with `DETERMINISTIC`.",
        True,
        type=click.BOOL,
    ),
]
