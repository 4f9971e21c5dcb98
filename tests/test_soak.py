"""scripts/soak.py: what it finds wrong in answers, counters, logs and memory; and a few seconds of
it against the real server on a tiny model."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import TinyModel
from .live import ROOT

sys.path.append(str(ROOT / "scripts"))  # where a script finds its siblings

from soak_checks import Tally, check_counters, check_log, check_process, slope
from soak_requests import GONE, Request, Result, Served, judge, make_request

SERVED = Served(100, 20, 50, 1.0, has_chat=True, has_grammar=True)
OK = frozenset({200})
PLAIN = Request("soak-1", b"", OK, "/generate", num_choices=1, completion_tokens=3)
STREAM = Request("soak-2", b"", OK, "/v1/completions", num_choices=1, stream=True)
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def answer(body: bytes, status: int = 200, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def plain(**changed: object) -> bytes:
    fields = {"text": "abc", "finish_reason": "length", "usage": USAGE} | changed
    return answer(json.dumps(fields).encode())


def stream(*events: object, end: bytes = b"data: [DONE]\n\n") -> bytes:
    body = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) + end
    return answer(body, kind="text/event-stream")


LAST = {"choices": [{"index": 0, "text": "abc", "finish_reason": "length"}]}
END = {"choices": [], "usage": USAGE}


def test_seed_fixes_the_requests_and_all_kinds_come() -> None:
    def made() -> list[Request]:
        dice = random.Random(5)
        return [make_request(dice, SERVED, str(number)) for number in range(400)]

    first = made()
    assert first == made()
    assert {request.leaves for request in first} == {"", "close", "reset", "half-close"}
    assert any(request.is_json for request in first)
    assert any(request.num_choices > 1 and request.stream for request in first)
    assert {400, 404, 405, 415, 504} <= {s for request in first for s in request.statuses}


@pytest.mark.parametrize(
    ("request_", "received"),
    [
        (PLAIN, plain()),
        (STREAM, stream(LAST, END)),
        (Request("a", b"", frozenset({400})), answer(b'{"error": {"code": "x"}}', 400)),
    ],
)
def test_right_answers_pass(request_: Request, received: bytes) -> None:
    assert judge(request_, received, 0.1).error == ""


@pytest.mark.parametrize(
    ("request_", "received", "told"),
    [
        (PLAIN, plain()[:-1], "cut short"),
        (PLAIN, b"", "no whole head"),
        (PLAIN, plain(finish_reason=None), "finish reasons"),
        (PLAIN, plain(usage=USAGE | {"total_tokens": 6}), "usage"),
        (PLAIN, plain(usage=USAGE | {"completion_tokens": 2, "total_tokens": 4}), "2 tokens"),
        (PLAIN, answer(b'{"error": {"code": "internal_error"}}', 500), "internal_error (500)"),
        (STREAM, stream(LAST, END, end=b""), "no [DONE]"),
        (STREAM, stream(LAST, LAST, END), "ended twice"),
        (STREAM, stream(LAST), "no usage"),
        (STREAM, stream({"error": {"code": "draining"}}, end=b""), "draining in its stream"),
        (Request("a", b"", frozenset({400})), plain(), "should be refused"),
    ],
)
def test_wrong_answers_are_told(request_: Request, received: bytes, told: str) -> None:
    assert told in judge(request_, received, 0.1).error


def results() -> Tally:
    tally = Tally()
    tally.add(Result(PLAIN, 200, 0.1, reasons=("length",)))
    tally.add(Result(STREAM, GONE, 0.1))
    tally.add(Result(Request("soak-3", b"", OK), 400, 0.1, code="invalid_value"))
    return tally


IDLE = {"num_requests_running": 0.0, "num_requests_waiting": 0.0}
ENDED = 'request_success_total{finish_reason="length"}'
REFUSED = 'requests_rejected_total{reason="invalid_value"}'


@pytest.mark.parametrize(
    ("changed", "failures"),
    [
        ({}, []),
        ({ENDED: 7.0}, []),  # the client that left had got it, or had not
        ({ENDED: 5.0}, ["choices ended"]),
        ({ENDED: 8.0}, ["choices ended"]),
        ({REFUSED: 0.0}, ["errors that were not counted"]),
        ({REFUSED: 3.0}, ["errors counted as invalid_value"]),
        ({"num_requests_running": 1.0}, ["num_requests_running is 1 at the end"]),
    ],
)
def test_counters_that_disagree_with_the_clients_are_told(
    changed: dict[str, float], failures: list[str]
) -> None:
    tally = results()
    check_counters(tally, IDLE | {ENDED: 5.0}, IDLE | {ENDED: 6.0, REFUSED: 1.0} | changed)
    assert list(tally.failures) == failures


def line(id_: str, status: int) -> str:
    fields = {"level": "INFO", "logger": "app.access", "request_id": id_, "status": status}
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("more", "failure"),
    [
        ([line("soak-3", 400)], ""),
        ([], "0 lines of a request in the log"),
        ([line("soak-3", 400)] * 2, "2 lines of a request in the log"),
        ([line("soak-3", 200)], "another status in the log"),
        ([line("soak-3", 400), "Traceback"], "a line of the log that is not JSON"),
        ([line("soak-3", 400), '{"level": "ERROR"}'], "an error in the log"),
    ],
)
def test_log_that_disagrees_with_the_clients_is_told(
    more: list[str], failure: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join([line("soak-1", 200), line("soak-2", 499), *more]))
    tally = results()
    check_log(tally, log)
    assert list(tally.failures) == ([failure] if failure else [])


def test_slope_is_that_of_the_line_and_its_error_that_of_what_is_left() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == (2, 0)
    found, error = slope([(0, 0), (1, 1), (2, 0), (3, 1)])
    assert (found, round(error, 4)) == (0.2, 0.2828)
    assert math.isnan(slope([(0, 0), (1, 1)])[0])


@pytest.mark.parametrize(
    ("end", "per_minute", "failures"),
    [
        ({"files": 6, "threads": 9}, 1.5, []),  # within the error
        ({"files": 16, "threads": 9}, 0.0, ["files grew"]),
        ({"files": 6, "threads": 19}, 0.0, ["threads grew"]),
        ({"files": 6, "threads": 9}, 3.0, ["memory grows"]),
    ],
)
def test_process_that_grows_is_told(
    end: dict[str, float], per_minute: float, failures: list[str]
) -> None:
    tally, start = Tally(), {"files": 6, "threads": 8}
    check_process(tally, start, end, {"per_minute": per_minute, "standard_error": 0.5}, 1.0)
    assert list(tally.failures) == failures


@pytest.mark.slow
def test_seconds_of_it_on_a_tiny_model_find_nothing(tiny_llama: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    command = [sys.executable, "scripts/soak.py", "--model", str(tiny_llama.folder)]
    options = ["--minutes", "0.05", "--warm-up-minutes", "0.04", "--sample-seconds", "0.2"]
    options += ["--max-slope", "1000"]
    options += ["--max-prompt", "60", "--max-answer", "20"]
    flags = ["--", "--threads", "1", "--max-batch-size", "3"]
    done = subprocess.run(
        [*command, *options, "--json", str(file), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(file.read_text())
    assert told["failures"] == {}
    assert told["by_status"]["200"] >= 3  # one of each row, and what the dice say
    assert len(told["samples"]) > 1
    assert told["end"]["anonymous_mib"] > 0
