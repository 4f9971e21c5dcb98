"""Behind nginx as it comes, with nothing but `proxy_pass` (FR40): events arrive one by one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent import socket

from app.sequence import StepPlan

from .services import StubService, running, until
from .sockets import serving_of

CONFIG = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen unix:{folder}/socket;
    location / {{ proxy_pass http://127.0.0.1:{port}; }}
  }}
}}
"""


@contextmanager
def nginx(folder: Path, port: int) -> Iterator[str]:
    """In front of `port`; the path of its socket."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if program is None:
        pytest.skip("there is no nginx")
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=port))
    process = subprocess.Popen(
        [program, "-e", str(folder / "error.log"), "-c", str(config)], stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: (folder / "socket").exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "error.log").read_text()
        yield str(folder / "socket")
    finally:
        process.terminate()
        process.wait()


class Steps:
    """The stub's `change`: each step waits until the test has read the event of the last."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)

    def __call__(self, plan: StepPlan, logits: object) -> None:
        assert self.permits.acquire(timeout=60)


def lines_of(connection: socket.socket) -> Iterator[bytes]:
    rest = b""
    while data := connection.recv(65536):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


ONE_TOKEN = re.compile(rb'"logprobs":(\[|\{)')
PROMPT = {"prompt": "a", "logprobs": 0}
CHAT = {"model": "stub", "messages": [{"role": "user", "content": "a"}], "logprobs": True}


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/generate", PROMPT), ("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)],
)
def test_each_event_is_through_before_the_next_token_is_made(
    path: str, asked: dict[str, Any], tmp_path: Path
) -> None:
    one_chunk = StubService(prefill_chunk=64)
    with gevent.Timeout(250), running(one_chunk) as service, serving_of(service) as server:
        service.stub.change = steps = Steps()
        body = json.dumps(asked | {"max_tokens": 6, "ignore_eos": True, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with (
            nginx(tmp_path, server.server_port) as address,
            socket.socket(socket.AF_UNIX) as connection,
        ):
            connection.connect(address)
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            steps.permits.release()  # the prompt, and the first token
            num_events = 0
            for line in lines_of(connection):
                if line.startswith(b"data: ") and ONE_TOKEN.search(line):
                    num_events += 1
                    steps.permits.release()
                    if num_events == 6:
                        break
        assert num_events == 6
        until(service.is_idle)
