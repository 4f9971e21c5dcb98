"""Settings of the queue: how much may wait.

They are options as `config.py`'s are, and fields of its `Settings`.
"""

from __future__ import annotations

import click

from .edge_options import number

QUEUE_OPTIONS: list[click.Parameter] = [
    number(
        "max_queued_requests",
        "Most requests that wait, each choice (`n`) counted; over it they get a 429.",
        *(1024, 1, 1_000_000),
    ),
    number(
        "max_queued_tokens",
        "Most prompt tokens that wait; over it requests get a 429.",
        *(524_288, 1, 1 << 30),
    ),
]
