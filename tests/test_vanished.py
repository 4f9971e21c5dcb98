"""A peer that vanishes without a word (FR41): in a network of its own, whose address then is gone,
so that nothing answers any more, not even with a reset."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import gevent
import pytest

from .services import SETTINGS, StubService, running, until
from .sockets import serving_of

OURS, THEIRS = "10.211.57.1", "10.211.57.2"
LIMIT_MS = 1000
SOON_SECONDS = 20  # a probe or two behind the limit, on a busy machine; the default is 30
_CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)
connection.sendall(sys.argv[3].encode())
sys.stdin.read()
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture
def network() -> Iterator[str]:
    """Its name; the way there is a pair of devices."""
    name = f"phi{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root may make networks, with `ip`")
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"networks cannot be made here: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", f"{name}b", "netns", name)
        ip("addr", "add", f"{OURS}/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "addr", "add", f"{THEIRS}/30", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        yield name
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True, timeout=60)
        ip("netns", "del", name)


@pytest.mark.parametrize("stream", [True, False])
def test_peer_that_vanishes_frees_its_slot_within_the_set_time(stream: bool, network: str) -> None:
    settings = replace(SETTINGS, host=OURS, tcp_user_timeout_ms=LIMIT_MS)
    service = StubService(settings, max_model_len=1_000_000)
    with gevent.Timeout(250), running(service), serving_of(service) as server:
        service.stub.change = lambda plan, logits: time.sleep(0.005)
        body = json.dumps({"prompt": "a", "max_tokens": 900_000, "stream": stream})
        head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sent = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
        command = [sys.executable, "-c", _CLIENT, OURS, str(server.server_port), sent]
        client = subprocess.Popen(["ip", "netns", "exec", network, *command], stdin=subprocess.PIPE)
        try:
            until(lambda: not service.is_idle())
            ip("-n", network, "addr", "del", f"{THEIRS}/30", "dev", f"{network}b")
            began_at = time.monotonic()
            until(service.is_idle)
            assert time.monotonic() - began_at < SOON_SECONDS
            assert client.poll() is None  # it has not left by itself
            until(lambda: not server.open)
        finally:
            client.kill()
            client.communicate()
