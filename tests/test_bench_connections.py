"""scripts/bench_connections.py against its paced server, small; and what it calls wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_connections import VOCAB, cases, fault

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_connections.py"


@pytest.mark.slow
def test_running_streams_are_measured_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    small = ["--queued", "", "--running", "4x20", "--seconds", "1", "--route", "chat"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *small, "--json", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == report
    [result] = report["results"]
    assert (result["case"], result["num_failures"]) == ("4x20", 0)
    assert result["events_per_second"] > 0  # of 80, on a machine that keeps up
    assert 0 < result["hub_share"] <= result["cpu_share"] < 2
    assert result["health_ms"]["num"] > 0
    assert result["health_ms"]["p50"] <= result["health_ms"]["p99"] <= result["health_ms"]["max"]


def test_cases_are_read() -> None:
    assert [case.name for case in cases("5,20", "7x2.5,8x1", "generate")] == [
        *("5 queued", "20 queued", "7x2.5", "8x1")
    ]
    assert cases("", "", "generate") == []


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def event(*tokens: int) -> bytes:
    text = "".join(f" {token % VOCAB}" for token in tokens)
    return chunk(b'data: {"text":"%b"}\n\n' % text.encode())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_right_streams_have_no_fault() -> None:
    assert fault(HEAD + event(0) + event(1, 2) + LAST, 3) is None
    assert fault(HEAD + b"".join(event(n) for n in range(300)) + LAST, 300) is None
    assert fault(HEAD + chunk(b": keep-alive\n\n"), 0) is None


@pytest.mark.parametrize(
    ("received", "num_tokens", "says"),
    [
        (b"HTTP/1.1 503 No\r\n\r\n", 1, "no 200"),
        (b"HTTP/1.1 200 OK\r\n\r\n", 1, "not in chunks"),
        (HEAD + event(0) + event(2) + LAST, 3, "2 of 3 tokens"),
        (HEAD + event(0) + event(0) + LAST, 2, "not in order"),
        (HEAD + event(1) + event(0) + LAST, 2, "not in order"),
        (HEAD + event(0), 1, "no end"),
        (HEAD + event(0)[:-4], 1, "not whole"),
        (HEAD + event(0), 0, "an event in the queue"),
    ],
)
def test_wrong_stream_is_named(received: bytes, num_tokens: int, says: str) -> None:
    assert says in (fault(received, num_tokens) or "")
