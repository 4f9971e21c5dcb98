"""Watch a running server in a terminal: what runs, waits and fails, and how fast it answers.

    python scripts/watch.py [--url http://127.0.0.1:8080] [--interval 1]    # q or Ctrl-C ends it
    python scripts/watch.py --once                                          # one table, for scripts

It reads `/metrics`, which needs no API key; with OPS_PORT give that port's address. Rates and
percentiles are of the last 10 seconds, the curves of the last minutes; errors count since the
server's start. A server that is away is asked again every interval.

With --once rates are of one interval and percentiles of all since the server's start; the exit
status is 1 if the server is away. The numbers: watch_tiles.py. It needs `rich`, which is in
requirements-dev.txt.
"""

import os
import select
import sys
import termios
import time
import tty
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from urllib.error import HTTPError, URLError

import click
from watch_tiles import TILES, History, Reading, parse, sparkline

try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError:
    sys.exit("watch.py needs rich: pip install rich (it is in requirements-dev.txt)")

_TIMEOUT_SECONDS = 5.0
_NUM_POINTS = 300
_OTHER_COLUMNS = 26  # of a row, beside the curve


class Away(Exception):
    """The server gives no metrics; the message says why."""


def scrape(url: str) -> Reading:
    """Raises Away."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT_SECONDS) as response:
            text = response.read().decode()
        return parse(text, time.monotonic())
    except HTTPError as error:
        hint = " (with OPS_PORT they are on that port)" if error.code == 404 else ""
        raise Away(f"HTTP {error.code} instead of metrics{hint}") from None
    except URLError as error:
        raise Away(str(error.reason)) from None
    except (HTTPException, OSError, ValueError) as error:
        raise Away(str(error) or type(error).__name__) from None


def headline(url: str, history: History, away: str) -> Text:
    if away:
        return Text(f"{url} is away: {away}; asked again until it answers", style="bold red")
    reading = history.last
    assert reading is not None
    is_ready = bool(reading.values.get("ready", 0))
    facts = [reading.model.get(label, "") for label in ("model", "precision", "provider")]
    text = Text(f"{url}  {' '.join(filter(None, facts))}  ")
    return text.append("ready" if is_ready else "not ready", "green" if is_ready else "bold red")


def rows(history: History, width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("now", justify="right", style="bold", no_wrap=True)
    table.add_column("last minutes", style="cyan", no_wrap=True)
    for tile, value, curve in zip(TILES, history.values, history.curves, strict=True):
        recent = list(curve)[-max(1, width - _OTHER_COLUMNS) :]
        table.add_row(tile.title, tile.show(value), sparkline(recent))
    return table


def errors(reading: Reading | None) -> Text:
    counts = reading.errors.items() if reading else ()
    most = sorted(counts, key=lambda item: -item[1])[:5]
    return Text(", ".join(f"{reason} {count:.0f}" for reason, count in most), style="red")


def show_once(url: str, interval: float) -> None:
    first = scrape(url)
    time.sleep(interval)
    last = scrape(url)
    start = Reading(at=first.at)  # nothing has been counted yet
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for tile in TILES:
        before = first if tile.title == "tokens/s" else start
        table.add_row(tile.title, tile.show(tile.measure(before, last)))
    Console().print(table)


@contextmanager
def keys() -> Iterator[None]:
    """Single keys can be read from the terminal, if there is one."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def is_told_to_end(seconds: float) -> bool:
    """Waits so long for a `q`."""
    give_up_at = time.monotonic() + seconds
    while (left := give_up_at - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0]:
            pressed = os.read(sys.stdin.fileno(), 64)
            if not pressed or pressed.lower().startswith(b"q"):
                return True
    return False


def show_live(url: str, interval: float) -> None:
    history = History(_NUM_POINTS)
    console = Console()
    with keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            away = ""
            try:
                history.add(scrape(url))
            except Away as error:
                away = str(error)
                history.miss()
            parts = [headline(url, history, away), Text(), rows(history, console.width)]
            live.update(Group(*parts, Text(), errors(history.last)), refresh=True)
            if is_told_to_end(interval):
                return


@click.command()
@click.option("--url", default="http://127.0.0.1:8080", help="Of the server, or its OPS_PORT.")
@click.option("--interval", type=click.FloatRange(0.1, 60), default=1.0, help="Seconds.")
@click.option("--once", is_flag=True, help="One table, then end.")
def main(url: str, interval: float, once: bool) -> None:
    url = url.rstrip("/")
    try:
        if once:
            show_once(url, interval)
        else:
            show_live(url, interval)
    except Away as error:
        sys.exit(f"{url} is away: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
