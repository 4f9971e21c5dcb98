"""The load generator: its pure parts alone, its command against a small real HTTP server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest

from scripts.bench import (
    Answer,
    make_prompts,
    percentile,
    percentiles_ms,
    summarize,
    take_events,
    tokens_per_second,
)

BENCH = Path(__file__).parents[1] / "scripts" / "bench.py"
STREAM = b': hello\n\ndata: {"text": "caf\xc3\xa9"}\n\ndata: {"text": "", "usage": {}}\r\n\r\n'
Body = dict[str, Any]


class FakeHandler(BaseHTTPRequestHandler):
    """Answers `/generate` with one word a token, and counts a word of the prompt as two tokens."""

    protocol_version = "HTTP/1.1"
    server: "FakeServer"

    def setup(self) -> None:
        self.server.num_connections += 1
        super().setup()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        status, events = self.server.answer(body)
        payload = json.dumps(events[-1]).encode()
        if status == 200 and body["stream"]:
            payload = b": a comment\n\n" + b"".join(
                b"data: " + json.dumps(event).encode() + b"\n\n" for event in events
            )
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at in range(0, len(payload), 7):  # not where the events end
            part = payload[at : at + 7]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close() waits for the handlers

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.bodies: list[Body] = []
        self.num_connections = 0

    def answer(self, body: Body) -> tuple[int, list[Body]]:
        num_words, num_tokens = len(body["prompt"].split()), body["max_tokens"]
        usage = {"prompt_tokens": 2 * num_words, "completion_tokens": num_tokens}
        last = {"text": "", "finish_reason": "length", "usage": usage}
        return 200, [{"text": "word "}] * num_tokens + [last]


@contextmanager
def serving(server: FakeServer) -> Iterator[str]:
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run_bench(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(BENCH), "--url", url, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def answer(sent_at: float, *text_at: float, failure: str = "") -> Answer:
    return Answer(sent_at, text_at[-1], list(text_at), 10, len(text_at), failure)


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_come_out_whole_wherever_the_bytes_are_cut(size: int) -> None:
    events, rest = [], b""
    for at in range(0, len(STREAM), size):
        new, rest = take_events(rest + STREAM[at : at + size])
        events += new
    assert (events, rest) == ([{"text": "café"}, {"text": "", "usage": {}}], b"")


def test_percentile_is_the_nearest_rank_of_the_sorted_values() -> None:
    values = [30, 10, 50, 20, 40]
    assert [percentile(values, p) for p in (0, 20, 21, 50, 95, 100)] == [10, 10, 20, 30, 50, 50]


def test_percentiles_of_nothing_are_null() -> None:
    assert percentiles_ms([]) is None


def test_throughput_is_the_tokens_of_good_answers_over_first_send_to_last_byte() -> None:
    run = [answer(1.0, 2.0, 3.0), answer(2.0, 4.0, 5.0), answer(2.0, 4.0, failure="gone")]
    assert tokens_per_second(run) == 4 / (5.0 - 1.0)


def test_summary_takes_ttft_from_the_send_and_itl_within_one_request() -> None:
    row = summarize(2, [[answer(0.0, 1.0, 1.5), answer(0.0, 3.0, 3.25)]])
    assert row["ttft_ms"] == {"p50": 1000, "p95": 3000, "p99": 3000}
    assert row["itl_ms"] == {"p50": 250, "p95": 500, "p99": 500}
    assert row["e2e_ms"] == {"p50": 1500, "p95": 3250, "p99": 3250}


def test_summary_of_repeats_gives_the_median_rate() -> None:
    row = summarize(1, [[answer(0.0, 1.0)], [answer(0.0, 0.1)], [answer(0.0, 0.5)]])
    assert row["tokens_per_second_runs"] == [1, 10, 2]
    assert row["tokens_per_second"] == 2


def test_summary_counts_failures_and_leaves_them_out_of_the_numbers() -> None:
    row = summarize(1, [[answer(0.0, 1.0), answer(1.0, 9.0, failure="gone")]])
    assert (row["requests"], row["failed"], row["failures"]) == (2, 1, {"gone": 1})
    assert row["e2e_ms"]["p99"] == 1000


def test_summary_of_nothing_but_failures_has_no_latencies() -> None:
    row = summarize(1, [[answer(0.0, 1.0, failure="gone")]])
    assert (row["tokens_per_second"], row["ttft_ms"], row["e2e_ms"]) == (0, None, None)


def test_prompts_are_fixed_by_the_seed_and_all_differ() -> None:
    prompts = make_prompts(Random(1), 32, 100)
    assert prompts == make_prompts(Random(1), 32, 100)
    assert len(set(prompts)) == 100


def test_command_measures_every_concurrency_and_ends_with_json(tmp_path: Path) -> None:
    server, file = FakeServer(), tmp_path / "bench.json"
    options = ["--concurrency", "1,3", "--prompt-tokens", "20", "--output-tokens", "5"]
    with serving(server) as url:
        done = run_bench(url, *options, "--requests", "4", "--repeats", "2", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(file.read_text())
    for row, concurrency in zip(report["results"], (1, 3), strict=True):
        assert (row["concurrency"], row["requests"], row["failed"]) == (concurrency, 8, 0)
        assert (row["completion_tokens"], row["mean_prompt_tokens"]) == (8 * 5, 20)
        assert len(row["tokens_per_second_runs"]) == 2
        assert row["ttft_ms"] and row["itl_ms"] and row["e2e_ms"]

    probe, *others = server.bodies
    assert (probe["max_tokens"], probe["stream"]) == (1, False)
    wanted = {"max_tokens": 5, "ignore_eos": True, "temperature": 0, "stream": True}
    assert all(body | wanted == body for body in others)
    assert len(others) == 2 * (1 + 4) + 2 * (3 + 4)  # a warm-up for each worker, then the requests
    assert len({body["prompt"] for body in server.bodies}) == len(server.bodies)
    assert server.num_connections == 1 + 2 * 1 + 2 * 3  # kept alive: one for each worker of a run


def test_command_without_streaming_has_no_token_times() -> None:
    with serving(FakeServer()) as url:
        done = run_bench(url, "--concurrency", "2", "--no-stream")
    [row] = json.loads(done.stdout.splitlines()[-1])["results"]
    assert (done.returncode, row["requests"], row["completion_tokens"]) == (0, 8, 8 * 64)
    assert (row["ttft_ms"], row["itl_ms"]) == (None, None)


class RefusingServer(FakeServer):
    def answer(self, body: Body) -> tuple[int, list[Body]]:
        busy = 429, [{"error": {"message": "come back later"}}]
        return busy if body["stream"] else super().answer(body)


class BreakingServer(FakeServer):
    def answer(self, body: Body) -> tuple[int, list[Body]]:
        status, events = super().answer(body)
        return status, [*events[:-1], events[-1] if body["max_tokens"] == 1 else {"error": {}}]


class HastyServer(FakeServer):
    def answer(self, body: Body) -> tuple[int, list[Body]]:
        return super().answer(body | {"max_tokens": 1})


@pytest.mark.parametrize(
    ("server", "failure"),
    [
        (RefusingServer, 'HTTP 429: {"error": {"message": "come back later"}}'),
        (BreakingServer, "error event: {}"),
        (HastyServer, "1 tokens instead of 64, finish_reason length"),
    ],
)
def test_command_names_failed_requests_and_exits_with_1(
    server: type[FakeServer], failure: str
) -> None:
    with serving(server()) as url:
        done = run_bench(url, "--concurrency", "2")
    [row] = json.loads(done.stdout.splitlines()[-1])["results"]
    assert (done.returncode, row["failed"]) == (1, 8)
    assert row["failures"] == {f"RequestFailed: {failure}": 8}
    assert f"FAILED 8 x RequestFailed: {failure}" in done.stdout


def test_command_says_when_nobody_answers() -> None:
    server = FakeServer()
    server.server_close()
    done = run_bench(f"http://127.0.0.1:{server.server_address[1]}")
    assert done.returncode == 1
    assert "the probe request to http://127.0.0.1" in done.stderr


def test_command_refuses_fewer_requests_than_workers() -> None:
    done = run_bench("http://127.0.0.1:9", "--concurrency", "8", "--requests", "4")
    assert "4 requests cannot keep 8 workers busy" in done.stderr
