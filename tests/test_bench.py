"""The load generator's command, against small real HTTP servers and the real one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gevent
import pytest

from app.service import Service

from .conftest import TinyModel
from .load_server import Body, FakeServer, RefusingServer, run_bench, serving
from .services import SETTINGS, running
from .sockets import serving_of
from .tiny import CONTEXT


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

    probes, others = server.bodies[:2], server.bodies[2:]
    assert [(probe["max_tokens"], probe["stream"]) for probe in probes] == [(1, False)] * 2
    wanted = {"max_tokens": 5, "ignore_eos": True, "temperature": 0, "stream": True}
    assert all(body | wanted == body for body in others)
    assert len(others) == 2 * (1 + 4) + 2 * (3 + 4)  # a warm-up for each worker, then the requests
    assert len({body["prompt"] for body in server.bodies}) == len(server.bodies)
    assert server.num_connections == 2 + 2 * 1 + 2 * 3  # kept alive: one for each worker of a run


def test_command_without_streaming_has_no_token_times() -> None:
    with serving(FakeServer()) as url:
        done = run_bench(url, "--concurrency", "2", "--no-stream")
    [row] = json.loads(done.stdout.splitlines()[-1])["results"]
    assert (done.returncode, row["requests"], row["completion_tokens"]) == (0, 8, 8 * 64)
    assert (row["ttft_ms"], row["itl_ms"]) == (None, None)


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
    assert row["failures"] == {failure: 8}
    assert f"FAILED 8 x {failure}" in done.stdout


def test_command_says_when_nobody_answers() -> None:
    server = FakeServer()
    server.server_close()
    done = run_bench(f"http://127.0.0.1:{server.server_address[1]}")
    assert done.returncode == 1
    assert "the probe request to http://127.0.0.1" in done.stderr


def test_command_refuses_fewer_requests_than_workers() -> None:
    done = run_bench("http://127.0.0.1:9", "--concurrency", "8", "--requests", "4")
    assert "4 requests cannot keep 8 workers busy" in done.stderr


def test_every_pair_of_lengths_has_its_row_and_shares_the_prefix() -> None:
    server = FakeServer()
    lengths = ["--prompt-tokens", "10,20", "--output-tokens", "2,3", "--shared-prefix-tokens", "8"]
    with serving(server) as url:
        done = run_bench(url, *lengths, "--concurrency", "2", "--requests", "2", "--warm-up", "0")
    rows = json.loads(done.stdout.splitlines()[-1])["results"]
    shapes = [(row["mean_prompt_tokens"], row["mean_completion_tokens"]) for row in rows]
    assert shapes == [(18, 2), (18, 3), (28, 2), (28, 3)]
    assert not any(row["prompts_off_length"] for row in rows)
    measured = [body["prompt"].split() for body in server.bodies[2:]]
    assert len(measured) == 8
    assert len({tuple(words[:4]) for words in measured}) == 1
    assert len({tuple(words[4:]) for words in measured}) == 8


def test_mix_is_one_load_of_all_lengths() -> None:
    server = FakeServer()
    options = ["--mix", "--prompt-tokens", "10,20", "--output-tokens", "2,3", "--requests", "40"]
    with serving(server) as url:
        done = run_bench(url, *options, "--concurrency", "4", "--seed", "1")
    [row] = json.loads(done.stdout.splitlines()[-1])["results"]
    assert (row["requests"], row["failed"], row["prompts_off_length"]) == (40, 0, 0)
    sent = {(len(body["prompt"].split()), body["max_tokens"]) for body in server.bodies[2:]}
    assert sent == {(5, 2), (5, 3), (10, 2), (10, 3)}


def test_open_loop_has_a_row_for_each_rate() -> None:
    options = ["--rate", "200,400", "--requests", "10", "--output-tokens", "2"]
    with serving(FakeServer()) as url:
        done = run_bench(url, *options)
    rows = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [(row["rate"], row["concurrency"], row["requests"]) for row in rows] == [
        (200, None, 10),
        (400, None, 10),
    ]
    assert all(row["sent_late_ms"]["p50"] >= 0 and not row["failed"] for row in rows)


def test_refusals_can_be_counted_without_being_failures() -> None:
    with serving(RefusingServer(num_refusals=3)) as url:
        options = ["--concurrency", "1", "--requests", "8", "--warm-up", "0"]
        done = run_bench(url, *options, "--on-429", "count")
    [row] = json.loads(done.stdout.splitlines()[-1])["results"]
    assert (done.returncode, row["errors"], row["refused_429"]) == (0, {"http_429": 3}, 3)
    assert row["completion_tokens"] == 5 * 64


def test_rates_that_are_none_are_refused() -> None:
    for rate in ("0", "-1", "inf", "nan", "fast"):
        done = run_bench("http://127.0.0.1:9", "--rate", rate)
        assert "give positive numbers with commas between them" in done.stderr


def test_real_server_is_measured_on_every_route_with_histories_that_grow(
    tiny_llama: TinyModel,
) -> None:
    settings = replace(SETTINGS, model_path=tiny_llama.folder, max_model_len=CONTEXT)
    options = ["--concurrency", "3", "--requests", "3", "--prompt-tokens", "30"]
    options += ["--output-tokens", "4", "--turns", "3"]
    with gevent.Timeout(250), running(Service(settings)) as service, serving_of(service) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        for api in ("generate", "completions"):
            # In a native thread: this server's hub is of this one, and has to turn.
            done = gevent.get_hub().threadpool.apply(run_bench, (url, *options, "--api", api))
            assert done.returncode == 0, done.stdout + done.stderr
            report = json.loads(done.stdout.splitlines()[-1])
            [row] = report["results"]
            assert (row["requests"], row["completion_tokens"]) == (9, 9 * 4)
            turns = row["turns"]
            assert [(turn["turn"], turn["requests"]) for turn in turns] == [(1, 3), (2, 3), (3, 3)]
            lengths = [turn["mean_prompt_tokens"] for turn in turns]
            assert lengths[0] + 20 < lengths[1] and lengths[1] + 20 < lengths[2]
            assert report["server"]["model_id"].startswith("llama")
        # What the server counted: both runs, their probes and their warm-up.
        counted = service.registry.get_sample_value("phi_serve_generation_tokens_total")
        assert counted == 2 * (9 * 4 + 2 + 3 * 3 * 4)
