"""What a shared library asks of others and offers them, as `readelf` (binutils) tells it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

_DYNAMIC = re.compile(r"\((NEEDED|SONAME)\).*\[(.*)\]")
# Num: Value Size Type Bind Vis Ndx Name[@VERSION or @@VERSION], perhaps with the version's number.
_SYMBOL = re.compile(r"^\s*\d+: \S+ +\S+ +\S+ +(\S+) +\S+ +(?:\[.*\] +)?(\S+) +(\S+)")


@dataclass
class Library:
    """`undefined` and `defined` are (name, version), version "" where there is none."""

    path: Path
    soname: str
    needed: list[str] = field(default_factory=list)
    undefined: set[tuple[str, str]] = field(default_factory=set)
    defined: set[tuple[str, str]] = field(default_factory=set)


def read_library(path: Path) -> Library:
    """Raises ValueError for what is no library: a script of the linker, a text."""
    command = ["readelf", "--wide", "--dynamic", "--dyn-syms", str(path)]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace")
    library = Library(path, path.name)
    for line in process.stdout.splitlines():
        if found := _DYNAMIC.search(line):
            if found[1] == "NEEDED":
                library.needed.append(found[2])
            else:
                library.soname = found[2]
        elif found := _SYMBOL.match(line):
            _add_symbol(library, *found.groups())
    if process.returncode or not library.defined | library.undefined:
        raise ValueError(f"{path} has no dynamic symbols: {process.stderr.strip()}")
    return library


def _add_symbol(library: Library, bind: str, section: str, name: str) -> None:
    name, _, version = name.partition("@")
    symbol = (name, version.lstrip("@"))
    if section != "UND":
        library.defined.add(symbol)
    elif bind != "WEAK":  # a weak one may stay without a definition
        library.undefined.add(symbol)
