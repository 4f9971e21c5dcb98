"""Threads of a real process (FR32, FR47): no more than its affinity mask has CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.model import OnnxModel

from .conftest import TinyModel
from .live import ROOT, LiveServer
from .tiny_tokenizers import byte_level_tokenizer

# The hub and the engine, the hub's threads for texts (4), templates (2) and grammars (2), and one
# for masks. The model's own, OpenMP's and Rust's have none beside their callers.
_MOST_THREADS = 11

# What a library believes that it may take, told by each of them, in the server's order of imports.
_COUNTS = """
import json, os, re
from app.machine import available_cpus, limit_threads
limit_threads(available_cpus())
import torch
found = dict(re.findall(r"([a-z_:]+)\\(\\) : (\\d+)", torch.__config__.parallel_info()))
print(json.dumps(found | {"rayon": os.environ["RAYON_NUM_THREADS"]}))
"""


@contextmanager
def one_cpu() -> Iterator[None]:
    """For processes that are started inside, as under `taskset`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def test_process_on_one_cpu_has_no_thread_pools_and_says_nothing_of_affinity(
    tiny_llama: TinyModel, tmp_path: Path
) -> None:
    with one_cpu():
        server = LiveServer(tiny_llama.folder, THREADS="0", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    with server:
        server.wait_ready()
        assert server.get("/info").json()["threads"] == 1
        for path, body in (
            ("/generate", {"prompt": "a", "max_tokens": 3, "regex": "[a-z]{1,9}"}),
            ("/tokenize", {"prompt": "abc " * 5000}),
        ):
            assert server.post(path, **body).status_code == 200
        assert psutil.Process(server.process.pid).num_threads() <= _MOST_THREADS
        # One process owns the metrics, whatever the environment is prepared for (FR49).
        assert server.metric('request_success_total{finish_reason="length"}') == 1
        assert list(tmp_path.iterdir()) == []
        lines = [json.loads(line) for line in server.log.splitlines()]
    assert {line["level"] for line in lines} == {"INFO"}
    assert "affinity" not in server.log


@pytest.mark.slow
def test_every_library_takes_the_threads_of_the_mask() -> None:
    with one_cpu():
        done = subprocess.run(
            [sys.executable, "-c", _COUNTS], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
    counts = json.loads(done.stdout)
    assert {"at::get_num_threads", "omp_get_max_threads", "rayon"} <= counts.keys()
    counts.pop("at::get_num_interop_threads")  # of a pool that nothing starts
    counts.pop("std::thread::hardware_concurrency")
    assert set(counts.values()) == {"1"}, counts


def test_session_has_the_threads_that_it_is_given_and_none_between_operators(
    tiny_llama: TinyModel,
) -> None:
    """FR32."""
    model: Any = OnnxModel.load(tiny_llama.folder, "cpu", num_threads=3)
    options = model._form._session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)


def test_server_keeps_the_tokenizers_from_a_thread_pool_of_their_own() -> None:
    """FR47."""
    told = "import os, app.__main__; print(os.environ['TOKENIZERS_PARALLELISM'])"
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", told],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "false", done.stderr


def test_process_that_has_tokenized_a_batch_may_start_another(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Tokenizers warn of a fork behind their thread pool, unless told to have none."""
    byte_level_tokenizer()(["some words " * 50] * 64)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    done = subprocess.run([sys.executable, "-c", ""], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert capfd.readouterr().err == ""
