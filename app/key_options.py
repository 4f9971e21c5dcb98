"""Settings of who may ask: API keys, and pages of other origins.

They are options as `config.py`'s are, and fields of its `Settings`.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from .edge_options import option
from .keys import BadKeys, Key, read_pairs

# As a browser sends it: no path, no default port, a host in lower case.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def _pairs(_: click.Context, __: click.Parameter, value: str) -> tuple[Key, ...]:
    try:
        return read_pairs(value)
    except BadKeys as error:
        raise click.BadParameter(str(error)) from None


def _file(_: click.Context, __: click.Parameter, value: str) -> Path | None:
    """Its keys are checked with the others, in `config`."""
    return Path(value) if value else None


def _origins(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    origins = tuple(origin.strip() for origin in value.split(",")) if value else ()
    if origins == ("*",):
        return origins
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise click.BadParameter(
                f"{origin!r:.100} is no origin: https://host or http://host:port, without a path "
                "and in lower case, or * alone."
            )
    return origins


KEY_OPTIONS: list[click.Parameter] = [
    option(
        "api_keys",
        "API keys as `name:secret`, separated by commas: requests need one. Better as a variable, "
        "for others see a process's flags.",
        "",
        callback=_pairs,
    ),
    option(
        "api_keys_file",
        "JSON file of API keys and their limits; read again when it changes.",
        "",
        callback=_file,
    ),
    option(
        "cors_origins",
        "Origins whose pages may ask from a browser, separated by commas, or `*`. Empty allows "
        "none.",
        "",
        callback=_origins,
    ),
]
