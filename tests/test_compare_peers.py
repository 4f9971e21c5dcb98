"""The comparison with peers, on small servers of this repository."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from compare_peers import reduce
from peers import known_peers
from peers_page import Measured, plot, write_page

from .load_server import run_script

FAKE = f"{sys.executable} -m tests.load_server {{port}}"
ROW = {"peer": "b", "concurrency": 2, "prompt_tokens": 8, "memory_bytes": 5, "failed": 0}
ROW |= {"tokens_per_second": 10.0, "ttft_ms": {"p50": 3.0}, "e2e_ms": {"p50": 9.0}}


def test_ratio_is_the_median_of_the_turns_own_ratios() -> None:
    ours = [ROW | {"tokens_per_second": rate} for rate in (30.0, 20.0, 90.0)]
    theirs = [ROW | {"tokens_per_second": rate} for rate in (10.0, 20.0, 10.0)]
    found = reduce(theirs, ours)
    assert found.ratios == [3, 1, 9]
    assert (found.rate, found.ttft_ms, found.memory_bytes) == (10, 3, 5)


def test_whole_answer_is_its_own_first_token() -> None:
    assert reduce([ROW | {"ttft_ms": None}], [ROW]).ttft_ms == 9
    assert reduce([ROW | {"ttft_ms": None, "e2e_ms": None}], [ROW]).ttft_ms is None


def test_well_known_peers_that_are_not_given_are_absent_with_the_reason() -> None:
    pythons, models = {"openvino": sys.executable}, {"openvino": "x"}
    peers = {peer.name: peer for peer in known_peers({"llama.cpp": "run {port}"}, pythons, models)}
    assert (peers["llama.cpp"].command, peers["llama.cpp"].absence) == ("run {port}", "")
    assert peers["openvino"].absence == "openvino-genai is not installed in its environment"
    assert "--peer-python" in peers["onnxruntime-genai"].absence
    assert peers["vllm"].absence == "no --peer vllm=COMMAND"


def test_page_has_rates_ratios_and_who_is_absent(tmp_path: Path) -> None:
    cells = [
        Measured("phi-serve", load, 64, [60.0, 50.0, 70.0], [1.0] * 3, 12.4, 10**9, 0)
        for load in (1, 8)
    ]
    cells += [Measured("b", 1, 64, [20.0] * 3, [3.0, 2.5, 3.5], None, 2 * 10**9, 1)]
    cells += [replace(cells[2], concurrency=8, failed=0)]
    config = {"prompt_tokens": [64], "output_tokens": 16, "repeats": 3, "commands": {"b": "run b"}}
    machine = {"cpu": "Toy", "amx": True, "cores": 2, "date": "2026-11-30T01:02", "python": "3.11"}
    page = tmp_path / "new" / "peers-toy.md"
    write_page(
        page,
        cells,
        {"c": "not here"},
        config,
        {"b": {"versions": {"b": 7}, "id": "/x/m"}},
        machine,
        None,
    )
    lines = page.read_text().splitlines()
    both = "60.0 (50.0..70.0) | 60.0 (50.0..70.0)"
    assert f"| phi-serve | {both} | 12 | 12 | 1.00 GB |" in lines
    assert "| b | 20.0 (20.0..20.0), 1 FAILED | 20.0 (20.0..20.0) | - | - | 2.00 GB |" in lines
    assert "| b | 3.00 (2.50..3.50) | 3.00 (2.50..3.50) |" in lines
    assert "- b: `run b` (b 7, id m)" in lines
    assert "- c is absent: not here" in lines
    assert "No plot: matplotlib is not installed." in lines
    assert "2026-11-30, Toy, AMX, 2 cores" in page.read_text()


def test_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [Measured("phi-serve", n, 64, [60.0], [1.0], 1.0, 1, 0) for n in (1, 8)]
    assert (plot(cells, tmp_path / "a.png") or tmp_path / "none").read_bytes()[:4] == b"\x89PNG"


def test_command_measures_in_turns_and_writes_the_page(tmp_path: Path) -> None:
    peers = ["--ours", FAKE, "--plain", FAKE, "--peer", f"llama.cpp={FAKE}"]
    peers += ["--peer", "vllm=/nowhere/vllm {port}"]
    load = ["--concurrency", "1,2", "--requests", "4", "--output-tokens", "3", "--repeats", "2"]
    output = ["--output", str(tmp_path), "--machine", "toy", "--json", str(tmp_path / "a.json")]
    done = run_script("compare_peers.py", *peers, *load, "--prompt-tokens", "10,20", *output)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "a.json").read_text()) == report
    order = [row["peer"] for row in report["rows"]]
    assert order == ["phi-serve", "plain", "llama.cpp"] * 8  # 2 lengths, 2 loads, 2 turns
    assert all(row["failed"] == 0 and row["memory_bytes"] > 1e6 for row in report["rows"])
    assert [row["ttft_ms"] is None for row in report["rows"][:3]] == [False, True, False]
    lengths = [row["mean_prompt_tokens"] for row in report["rows"]]
    assert lengths == [10.0] * 12 + [20.0] * 12
    assert set(report["absent"]) == {"vllm", "openvino", "onnxruntime-genai"}
    assert "No such file" in report["absent"]["vllm"]
    page = (tmp_path / "peers-toy.md").read_text()
    assert "## Prompts of 20 tokens" in page and "vllm is absent" in page
    assert str(tmp_path.root + "root") not in page  # no folder of this machine


def test_our_own_server_must_start(tmp_path: Path) -> None:
    done = run_script("compare_peers.py", "--ours", "false", "--output", str(tmp_path))
    assert done.returncode == 1
    assert "our own server: it ended with 1 before it was ready" in done.stderr
