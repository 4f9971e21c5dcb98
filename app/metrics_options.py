"""Settings of what is measured.

They are options as `config.py`'s are, and fields of its `Settings`.
"""

from __future__ import annotations

import click

from .edge_options import number, option

METRICS_OPTIONS: list[click.Parameter] = [
    number(
        "saturation_wait_seconds",
        "Seconds that a request should wait in the queue at the most: an expected wait as long as "
        "this is a `phi_serve_saturation_ratio` of 1.",
        *(5, 1, 86_400),
    ),
    option(
        "metrics_aliases",
        "`vllm`: `/metrics` has vLLM's names, too, for dashboards and autoscalers that know those.",
        "none",
        type=click.Choice(["none", "vllm"]),
    ),
]
