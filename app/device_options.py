"""Settings of the device: what the server may take of a GPU.

They are options as `config.py`'s are, and fields of its `Settings`.
"""

from __future__ import annotations

import click

from .edge_options import number

DEVICE_OPTIONS: list[click.Parameter] = [
    number(
        "max_gpu_memory_bytes",
        "Most bytes of a GPU's memory that the process takes: weights, KV cache and workspace; 0 "
        "takes what is free.",
        *(0, 0, 1 << 50),
    ),
]
