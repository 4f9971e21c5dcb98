"""Keys and the second port of a server as its own process: OpenAI's client, a file that changes,
the end of both ports."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import requests
from openai import OpenAI

from .live import ROOT, LiveServer, wait_for
from .test_drain import StubServer, stub_server
from .test_ops_port import free_port

SECRETS = ("sk-in-the-variable", "sk-in-the-file", "sk-of-later")


def write_keys(path: Path, secret: str, **limits: int) -> None:
    path.write_text(json.dumps({"keys": [{"name": "bob", "secret": secret, **limits}]}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keyed")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[StubServer]:
    write_keys(folder / "keys.json", SECRETS[1], requests_per_minute=3)
    environment = {
        "API_KEYS": f"ann:{SECRETS[0]}",
        "API_KEYS_FILE": str(folder / "keys.json"),
        "OPS_PORT": str(free_port()),
    }
    with stub_server(folder / "model", 4, **environment) as server:
        logged = re.compile(r"health and metrics on (http://[0-9.:]+)")
        ops = wait_for(lambda: logged.search(server.log), "the second port")[1]
        server.ops = ops  # type: ignore[attr-defined]
        wait_for(lambda: requests.get(f"{ops}/health/ready", timeout=60).ok, "readiness")
        yield server


def client_with(server: LiveServer, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(server: LiveServer, key: str) -> int:
    with client_with(server, key) as client:
        answer = client.completions.create(model="stub", prompt="abc", max_tokens=3)
    assert answer.usage is not None
    return answer.usage.total_tokens


def test_openais_client_gets_in_with_a_key_and_an_authentication_error_without(
    server: StubServer,
) -> None:
    assert ask(server, SECRETS[0]) == 6
    with pytest.raises(openai.AuthenticationError) as raised:
        ask(server, "none")
    assert (raised.value.code, raised.value.status_code) == ("invalid_api_key", 401)


def test_openais_client_gets_a_rate_limit_error(server: StubServer) -> None:
    num_answers = 0
    with pytest.raises(openai.RateLimitError) as raised:
        for _ in range(30):  # on a machine that stalls another one has come by: one in 20 seconds
            ask(server, SECRETS[1])
            num_answers += 1
    assert num_answers >= 3
    assert raised.value.code == "rate_limit_exceeded"
    assert 1 <= int(raised.value.response.headers["Retry-After"]) <= 60


def test_file_that_changes_or_breaks_is_noticed_by_the_running_server(
    server: StubServer, folder: Path
) -> None:
    write_keys(folder / "keys.json", SECRETS[2])
    wait_for(lambda: server.log.count("2 keys count now") == 2, "the new keys")
    assert ask(server, SECRETS[2]) == 6
    with pytest.raises(openai.AuthenticationError):
        ask(server, SECRETS[1])
    (folder / "keys.json").unlink()
    wait_for(lambda: "No such file" in server.log, "the missing file")
    assert ask(server, SECRETS[2]) == 6


def test_both_ports_end_with_the_server_and_no_secret_was_logged(server: StubServer) -> None:
    ops = server.ops  # type: ignore[attr-defined]
    assert requests.get(f"{server.url}/metrics", timeout=60).status_code == 404
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    for url in (server.url, ops):
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/health/live", timeout=60)
    server._reader.join()
    assert '"owner":"ann"' in server.log
    assert not any(secret in server.log for secret in SECRETS)


def test_port_that_is_taken_ends_the_start_with_2(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = subprocess.run(
            [sys.executable, "-m", "tests.stub_server", "--host", "127.0.0.1", "--port", "0"],
            cwd=ROOT,
            env={"PATH": "", "MODEL_PATH": str(folder / "model"), "OPS_PORT": port},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert run.returncode == 2
    lines = [json.loads(line) for line in run.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["CRITICAL", "INFO"]
    assert f"OPS_HOST= OPS_PORT={port}: Address already in use" in lines[0]["message"]
    assert lines[1]["message"] == "ended with status 2"
