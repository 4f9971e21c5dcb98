"""scripts/watch.py: its numbers, one table, and the live view in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from watch_tiles import TILES, History, Reading, parse, quantile, rate, sparkline

from .live import ROOT, wait_for
from .test_drain import StubServer, fill, stub_server
from .test_ops_port import free_port

SCRIPT = ROOT / "scripts" / "watch.py"
TITLES = [tile.title for tile in TILES]


def text(tokens: int = 0, counts: tuple[int, ...] = ()) -> str:
    """A scrape; `counts` are of the buckets up to 0.1, up to 0.2 and of all."""
    lines = ["phi_serve_num_requests_running 2.0", f"phi_serve_generation_tokens_total {tokens}"]
    lines += ["# TYPE phi_serve_x_seconds histogram"]
    for bound, count in zip(("0.1", "0.2", "+Inf"), counts, strict=False):
        lines.append(f'phi_serve_x_seconds_bucket{{le="{bound}"}} {count}')
    return "\n".join([*lines, ""])


def test_quantile_is_of_what_came_between_two_readings() -> None:
    before = parse(text(counts=(5, 5, 5)), 0.0)
    now = parse(text(counts=(5, 15, 15)), 1.0)
    assert quantile(before, now, "x_seconds", 0.5) == pytest.approx(0.15)
    assert quantile(before, now, "x_seconds", 1.0) == pytest.approx(0.2)
    assert quantile(now, now, "x_seconds", 0.5) is None
    assert quantile(before, now, "y_seconds", 0.5) is None


def test_quantile_beyond_the_last_bound_is_that_bound() -> None:
    now = parse(text(counts=(1, 1, 10)), 1.0)
    assert quantile(Reading(0.0), now, "x_seconds", 0.95) == 0.2


def test_rate_is_by_the_second() -> None:
    assert rate(parse(text(100), 1.0), parse(text(300), 5.0), "generation_tokens_total") == 50
    assert rate(parse(text(100), 1.0), parse(text(300), 1.0), "generation_tokens_total") is None


def test_restart_that_nobody_saw_gives_no_negative_rate() -> None:
    history = History(10)
    for second, tokens in enumerate((100, 300, 20, 60)):
        history.add(parse(text(tokens), float(second)))
    titles_values = dict(zip(TITLES, history.values, strict=True))
    assert titles_values["tokens/s"] == 40
    curve = dict(zip(TITLES, history.curves, strict=True))["tokens/s"]
    assert list(curve) == [None, 200, None, 40]


def test_server_that_is_away_leaves_a_gap() -> None:
    history = History(10)
    history.add(parse(text(100), 0.0))
    history.miss()
    history.add(parse(text(100), 2.0))
    curve = dict(zip(TITLES, history.curves, strict=True))["running"]
    assert list(curve) == [2, None, 2]
    assert sparkline(list(curve)) == "█ █"


def test_sparkline_begins_at_nought() -> None:
    assert sparkline([0.0, 1.0, 2.0]) == "▁▅█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""


@pytest.mark.parametrize("other", ["<html>", "x 1\n", ""])
def test_what_is_not_this_servers_is_refused(other: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(other, 0.0)


# --- a real server --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


def start(folder: Path, port: int) -> StubServer:
    return stub_server(folder, 2, port)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def table(printed: str) -> dict[str, str]:
    lines = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    return {line[0]: line[1] for line in lines}


def test_once_prints_the_servers_own_numbers(folder: Path) -> None:
    with stub_server(folder / "once", 2) as server:
        server.wait_ready()
        assert server.post(prompt="a", max_tokens=-1).status_code == 400
        streams = fill(server, 2, 20)  # both run, and the model waits
        count = "time_to_first_token_seconds_count"
        wait_for(lambda: server.metric(count) == 2, "their first tokens")
        done = run("--once", "--url", server.url, "--interval", "0.1")
        ttft = parse(server.get("/metrics").text, 1.0)
        (folder / "once" / "gate").touch()
        for raw in streams:
            raw.close()
    assert done.returncode == 0, done.stderr
    printed = table(done.stdout)
    assert list(printed) == TITLES
    expected = {"running": "2", "waiting": "0", "batch limit": "2", "tokens/s": "0", "errors": "1"}
    assert {name: printed[name] for name in expected} == expected
    shown = {tile.title: tile.show for tile in TILES}
    for percent in (50, 95):
        seconds = quantile(Reading(0.0), ttft, "time_to_first_token_seconds", percent / 100)
        assert seconds is not None
        title = f"TTFT p{percent}"
        assert printed[title] == shown[title](seconds)


def test_once_without_a_server_ends_with_1_and_says_so() -> None:
    done = run("--once", "--url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "is away" in done.stderr
    assert "refused" in done.stderr


def test_missing_rich_is_named() -> None:
    program = f"import sys; sys.modules['rich'] = None; sys.path.insert(0, {str(SCRIPT.parent)!r})"
    command = [sys.executable, "-c", f"{program}; import watch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install rich" in done.stderr


class Terminal:
    """watch.py in a terminal of 120 columns. Use as a context manager."""

    def __init__(self, *arguments: str) -> None:
        was = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a child inherits that it is ignored
        self._own, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            env=os.environ | {"TERM": "xterm-256color"},
        )
        os.close(child)
        signal.signal(signal.SIGINT, was)
        self._received = b""
        self._seen = 0
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        os.close(self._own)

    def press(self, key: str) -> None:
        os.write(self._own, key.encode())

    @property
    def shown(self) -> str:
        """All that it has shown so far, without colours and the like."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._received.decode("utf-8", "replace"))

    def wait_to_see(self, pattern: str) -> None:
        """Behind what has been seen before."""
        found = wait_for(lambda: re.compile(pattern).search(self.shown, self._seen), pattern)
        self._seen = found.end()

    def _read(self) -> None:
        while True:
            try:
                received = os.read(self._own, 65536)
            except OSError:  # the other end is closed
                return
            if not received:
                return
            self._received += received


@pytest.fixture
def terminal(port: int) -> Iterator[Terminal]:
    with Terminal("--url", f"http://127.0.0.1:{port}", "--interval", "0.3") as terminal:
        yield terminal


def test_live_view_survives_a_restart_of_the_server(
    terminal: Terminal, folder: Path, port: int
) -> None:
    terminal.wait_to_see("is away: .*refused")
    with start(folder / "first", port) as server:
        terminal.wait_to_see(r"(?s:  ready.+?)running +0 +▁")
        streams = fill(server, 2, 20)
        terminal.wait_to_see(r"(?s:running +2 [^\n]*█.+?)TTFT p95 +[\d.]+ m?s")
    terminal.wait_to_see("is away")
    for raw in streams:
        raw.close()
    with start(folder / "second", port):
        terminal.wait_to_see(r"(?s:  ready.+?)running +0 [^\n]*█ +▁")
    terminal.press("q")
    assert terminal.process.wait(60) == 0


def test_interrupt_ends_the_live_view_quietly(terminal: Terminal) -> None:
    terminal.wait_to_see("is away")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(60) == 0
    assert "Traceback" not in terminal.shown
