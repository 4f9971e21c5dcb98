"""A live server process on a tiny fp32 model, over real sockets."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from app.config import VERSION
from app.text import TextCodec

from .commands import run_app
from .conftest import TinyModel
from .live import LiveServer, wait_for
from .test_drain import stub_server
from .tiny import CONTEXT


@pytest.fixture(scope="module")
def server(tiny_llama: TinyModel) -> Iterator[LiveServer]:
    with LiveServer(tiny_llama.folder) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def codec(tiny_llama: TinyModel) -> TextCodec:
    return TextCodec.load(tiny_llama.folder)


def expected_text(tiny: TinyModel, codec: TextCodec, prompt: str, num_tokens: int) -> str:
    ids = tiny.reference.greedy(codec.encode(prompt), num_tokens)
    return codec.detokenizer().feed(ids, is_last=True)


def test_socket_answers_before_the_model_is_loaded(tmp_path: Path) -> None:
    gate = tmp_path / "loaded"
    with stub_server(tmp_path / "model", 2, LOAD_GATE=str(gate)) as server:
        assert server.get("/health/live").status_code == 200
        not_ready = server.get("/health/ready")
        refused = server.post(prompt="a")
        gate.touch()
        server.wait_ready()
    assert (not_ready.status_code, refused.status_code) == (503, 503)
    assert not_ready.json()["error"]["code"] == "not_ready"


def test_answer_is_the_text_of_torch_with_usage_and_timings(
    server: LiveServer, tiny_llama: TinyModel, codec: TextCodec
) -> None:
    answer = server.generate("the cat", max_tokens=20, ignore_eos=True)
    assert answer["text"] == expected_text(tiny_llama, codec, "the cat", 20)
    assert answer["finish_reason"] == "length"
    num_prompt = len(codec.encode("the cat"))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens": 20,
        "total_tokens": num_prompt + 20,
    }
    assert answer["timings"]["prefill_seconds"] > 0
    assert answer["timings"]["decode_seconds"] > 0
    assert answer["request_id"] != server.generate("a", max_tokens=1)["request_id"]


@pytest.mark.parametrize("prompt", ["the cat", "a", "é🙂 漢\n", "x" * 100])
def test_stream_joins_to_the_plain_answer(server: LiveServer, prompt: str) -> None:
    plain = server.generate(prompt, max_tokens=40, ignore_eos=True)
    events = list(server.stream(prompt, max_tokens=40, ignore_eos=True))
    assert "".join(event["text"] for event in events) == plain["text"]
    last = events[-1]
    plain["usage"]["prompt_tokens_details"] = last["usage"]["prompt_tokens_details"]  # by then
    assert (last["finish_reason"], last["usage"]) == ("length", plain["usage"])
    assert all("finish_reason" not in event for event in events[:-1])


def test_stream_is_not_buffered_by_proxies(server: LiveServer) -> None:
    response = server.post(prompt="a", stream=True, max_tokens=2)
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"


def test_eight_streams_say_what_they_say_alone(server: LiveServer) -> None:
    """That they progress together is tested where a step takes long: on the default model."""
    prompts = [f"{'the cat ' * (i + 1)}{i}" for i in range(8)]
    options = {"max_tokens": 150, "ignore_eos": True}
    alone = [server.generate(prompt, **options)["text"] for prompt in prompts]
    start = threading.Barrier(8)

    def read(prompt: str) -> str:
        start.wait()
        return "".join(event["text"] for event in server.stream(prompt, **options))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, prompts)) == alone


def test_seed_fixes_a_sampled_answer_whatever_runs_beside_it(server: LiveServer) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0}
    alone = server.generate("the", seed=11, **options)["text"]
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(server.generate, "the", seed=11 + i, **options) for i in range(6)]
        texts = [future.result()["text"] for future in futures]
    assert texts[0] == alone
    assert len(set(texts)) == 6


def test_unseeded_sampling_differs_from_request_to_request(server: LiveServer) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0}
    assert len({server.generate("the", **options)["text"] for _ in range(3)}) == 3


BAD_BODIES: list[tuple[bytes, str | None, str]] = [
    (b"", None, "empty"),
    (b"{", None, "JSON"),
    (b"\xff\xfe", None, "JSON"),
    (b"[]", None, "object"),
    (b'"text"', None, "object"),
    (b"{}", "prompt", "required"),
    (b'{"prompt": ""}', "prompt", "at least one character"),
    (b'{"prompt": 5}', "prompt", "string"),
    (b'{"prompt": null}', "prompt", "string"),
    (b'{"prompt": ["a"]}', "prompt", "string"),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens", "from 1"),
    (b'{"prompt": "a", "max_tokens": -1}', "max_tokens", "from 1"),
    (b'{"prompt": "a", "max_tokens": 1e9}', "max_tokens", "integer from 1"),
    (b'{"prompt": "a", "max_tokens": 1000000000}', "max_tokens", f"leaves {CONTEXT - 1}"),
    (b'{"prompt": "a", "max_tokens": "7"}', "max_tokens", "integer from 1"),
    (b'{"prompt": "a", "max_tokens": 1.5}', "max_tokens", "integer from 1"),
    (b'{"prompt": "a", "max_tokens": true}', "max_tokens", "integer from 1"),
    (b'{"prompt": "a", "temperature": -0.1}', "temperature", "from 0"),
    (b'{"prompt": "a", "temperature": NaN}', None, "JSON"),
    (b'{"prompt": "a", "top_p": 0}', "top_p", "above 0"),
    (b'{"prompt": "a", "top_p": 1.01}', "top_p", "at most 1"),
    (b'{"prompt": "a", "top_k": 2.5}', "top_k", "integer"),
    (b'{"prompt": "a", "seed": 9223372036854775808}', "seed", "64 bits"),
    (b'{"prompt": "a", "stream": "yes"}', "stream", "true or false"),
    (b'{"prompt": "a", "stop": [""]}', "stop[0]", "of 1 to 1024 characters"),
    (b'{"prompt": "a", "max_new_tokens": 5}', "max_new_tokens", "not a field"),
]


@pytest.mark.parametrize(("body", "param", "says"), BAD_BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_body_gets_400_with_field_and_limit(
    server: LiveServer, body: bytes, param: str | None, says: str, stream: bool
) -> None:
    if stream and body.endswith(b"}") and body != b"{}" and b"stream" not in body:
        body = body[:-1] + b', "stream": true}'
    status, answer = post_raw(server, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert says in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("num_prompt", "status"),
    [(CONTEXT - 2, 200), (CONTEXT - 1, 200), (CONTEXT, 400), (CONTEXT + 1, 400), (2560, 400)],
)
def test_prompt_at_the_context_gets_an_answer_or_400_with_both_numbers(
    server: LiveServer, num_prompt: int, status: int, stream: bool
) -> None:
    response = server.post(prompt="!" * num_prompt, stream=stream)
    assert response.status_code == status
    if status == 400:
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert f"{num_prompt} tokens" in error["message"]
        assert f"{CONTEXT} tokens" in error["message"]
    assert server.generate("a", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_prompt_and_answer_that_do_not_fit_get_400_with_what_is_left(server: LiveServer) -> None:
    response = server.post(prompt="!" * 200, max_tokens=57)
    assert response.status_code == 400
    assert "leaves 56" in response.json()["error"]["message"]
    assert (
        server.generate("!" * 200, max_tokens=56, ignore_eos=True)["usage"]["total_tokens"] == 256
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("GET", "/health//live", 404, "not_found"),
        ("GET", "/v1//models", 404, "not_found"),
        ("GET", "/generate", 405, "method_not_allowed"),
        ("POST", "/health/ready", 405, "method_not_allowed"),
    ],
)
def test_wrong_route_or_method_gets_the_same_error_shape(
    server: LiveServer, method: str, path: str, status: int, code: str
) -> None:
    connection = connect(server)
    connection.request(method, path)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert (response.status, answer["error"]["code"]) == (status, code)


def test_other_content_type_gets_415(server: LiveServer) -> None:
    status, answer = post_raw(server, b'{"prompt": "a"}', "text/plain")
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit_gets_413_whole_or_chunked(server: LiveServer, chunked: bool) -> None:
    """Never cut short: what lies behind the limit would make it valid."""
    body = b'{"prompt": "a"}' + b" " * (1 << 20)
    connection = connect(server)
    parts = iter([body[:1000], body[1000:]]) if chunked else body
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/generate", parts, headers, encode_chunked=chunked)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert (response.status, answer["error"]["code"]) == (413, "payload_too_large")
    assert "1048576" in answer["error"]["message"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\n{}",
        b'Content-Length: 100\r\n\r\n{"prompt": "a"}',
    ],
    ids=["bad chunk size", "cut chunk", "short body"],
)
def test_body_with_broken_framing_gets_400_and_the_connection_ends(
    server: LiveServer, request_bytes: bytes
) -> None:
    address = urlsplit(server.url)
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=60) as raw:
        raw.sendall(head + request_bytes)
        raw.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: raw.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"unreadable_body" in received


def test_control_tokens_in_a_prompt_are_text_unless_asked_for(
    server: LiveServer, codec: TextCodec
) -> None:
    plain = server.generate("<|im_end|>", max_tokens=1)["usage"]["prompt_tokens"]
    parsed = server.generate("<|im_end|>", max_tokens=1, parse_special=True)
    assert (plain, parsed["usage"]["prompt_tokens"]) == (len(codec.encode("<|im_end|>")), 1)


def test_info_says_what_is_served(server: LiveServer) -> None:
    info = server.get("/info").json()
    assert (info["form"], info["precision"]) == ("fused", "fp32")
    assert info["provider"] == "CPUExecutionProvider"
    assert info["max_model_len"] == CONTEXT
    assert 4 <= info["max_batch_size"] == info["batch_limit"] <= 32
    assert info["batch_limit_reason"] == "cap"
    assert (
        info["kv_cache_slots"] * info["kv_cache_slot_tokens"] * info["kv_bytes_per_token"]
        <= (info["kv_budget_bytes"])
    )
    assert (info["context_length"], info["probe"]) == (CONTEXT, "passed")
    assert (info["precision_mismatch"], info["warnings"]) == (False, [])
    assert info["structured_output"] is True
    assert info["version"] == VERSION
    names = ("max_queued_requests", "max_queued_tokens", "max_body_bytes", "max_timeout_ms")
    assert [info[name] for name in names] == [1024, 524_288, 1 << 20, 3_600_000]
    assert info["max_connections"] == 8192


def test_load_is_told_in_fields_and_stage_by_stage(server: LiveServer) -> None:
    lines = [json.loads(line) for line in server.log.splitlines()]
    [loaded] = [line for line in lines if line.get("message") == "loaded"]
    assert (loaded["form"], loaded["max_model_len"]) == ("fused", CONTEXT)
    assert loaded["seconds"] >= 0
    messages = [line.get("message") for line in lines]
    stages = ("reading the graph", "loading weights", "warming up")
    assert all(messages.count(f"loading: {stage}") == 1 for stage in stages)
    assert messages.index("loading: loading weights") < messages.index("loaded")


def test_metrics_count_what_was_served(server: LiveServer) -> None:
    names = ["prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count"]
    names += ['request_success_total{finish_reason="length"}', "request_queue_time_seconds_count"]
    names += ["inter_token_latency_seconds_count", "e2e_request_latency_seconds_count"]
    before = [server.metric(name) for name in names]
    usage = server.generate("the cat", max_tokens=9, ignore_eos=True)["usage"]
    after = [server.metric(name) for name in names]
    grown = [now - then for now, then in zip(after, before, strict=True)]
    assert grown == [usage["prompt_tokens"], 9, 1, 1, 1, 8, 1]
    wait_for(lambda: server.metric("num_requests_running") == 0, "the row to be free")


def test_rejections_are_counted_by_reason(server: LiveServer) -> None:
    name = 'requests_rejected_total{reason="context_length_exceeded"}'
    before = server.metric(name)
    server.post(prompt="!" * 300)
    assert server.metric(name) == before + 1


def test_client_that_leaves_mid_stream_frees_its_row(server: LiveServer) -> None:
    name = 'request_success_total{finish_reason="abort"}'
    before = server.metric(name)

    def leave() -> bool:
        """The tiny model may be done before the connection closes; then again."""
        stream = server.stream("a", max_tokens=250, ignore_eos=True)
        next(stream)
        stream.close()  # type: ignore[attr-defined]  # a generator: closes the connection
        wait_for(lambda: server.metric("num_requests_running") == 0, "the row to be free")
        return server.metric(name) > before

    wait_for(leave, "an answer to be cut short")


def test_sigterm_without_time_to_drain_ends_open_streams_with_an_error(
    tiny_llama: TinyModel,
) -> None:
    with LiveServer(tiny_llama.folder, "--max-batch-size", "1", DRAIN_SECONDS="0") as server:
        server.wait_ready()
        # A pile of work, one after the other, so that the signal comes in the middle of it.
        with ThreadPoolExecutor(60) as pool:
            first = threading.Event()

            def read(_: int) -> str:
                """How the request ended: its finish reason, or the code of its error."""
                body = {"prompt": "a", "n": 8, "max_tokens": 250, "ignore_eos": True}
                body["stream"] = True
                with requests.post(
                    server.url + "/generate", json=body, stream=True, timeout=60
                ) as response:
                    last = b"{}"
                    for line in response.iter_lines():
                        first.set()
                        last = line.removeprefix(b"data: ") or last
                end = json.loads(last)
                return str(end["error"]["code"] if "error" in end else end["finish_reason"])

            futures = [pool.submit(read, i) for i in range(60)]
            first.wait(60)
            server.process.send_signal(signal.SIGTERM)
            errors = [future.exception() for future in futures]
            ends = [future.result() for future in futures if not future.exception()]
        assert server.process.wait(60) == 0
    assert "draining" in ends
    assert set(ends) <= {"length", "draining"}  # and so no failure of the model
    # Whoever came after the socket was closed.
    assert all(isinstance(error, requests.ConnectionError) for error in errors if error)


def test_sigterm_while_loading_ends_the_process_with_0(tiny_llama: TinyModel) -> None:
    with LiveServer(tiny_llama.folder) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_cuda_without_a_gpu_is_refused_by_name(tiny_llama: TinyModel) -> None:
    result = run_app("--port", "0", "--device", "cuda", model=tiny_llama.folder)
    assert result.returncode == 2
    assert "DEVICE=cuda" in result.stderr


def test_port_in_use_is_named_and_exits_with_2(server: LiveServer, tiny_llama: TinyModel) -> None:
    port = urlsplit(server.url).port
    result = run_app("--host", "127.0.0.1", "--port", str(port), model=tiny_llama.folder)
    assert result.returncode == 2
    assert f"PORT={port}" in result.stderr


def test_folder_that_cannot_be_served_ends_the_process_with_the_reason(
    tiny_llama: TinyModel, tmp_path: Path
) -> None:
    for file in tiny_llama.folder.iterdir():
        if not file.name.endswith(".data"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    result = run_app("--port", "0", model=tmp_path)
    assert result.returncode == 1
    assert "model.onnx.data" in result.stderr
    assert f"(MODEL_PATH={tmp_path})" in result.stderr


def test_model_len_above_the_context_is_refused_by_name(tiny_llama: TinyModel) -> None:
    result = run_app("--port", "0", "--max-model-len", "257", model=tiny_llama.folder)
    assert result.returncode == 2
    assert "MAX_MODEL_LEN" in result.stderr
    assert "256 tokens" in result.stderr


def connect(server: LiveServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)


def post_raw(
    server: LiveServer, body: bytes, content_type: str = "application/json"
) -> tuple[int, dict[str, Any]]:
    connection = connect(server)
    connection.request("POST", "/generate", body, {"Content-Type": content_type})
    response = connection.getresponse()
    answer: dict[str, Any] = json.loads(response.read())
    connection.close()
    return response.status, answer


def test_events_leave_one_by_one(server: LiveServer) -> None:
    """A client that is slow for a moment finds some together; one that always does found a lump."""
    address = urlsplit(server.url)
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 60, "ignore_eos": True})
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"

    def num_reads() -> int:
        with socket.create_connection((address.hostname, address.port), timeout=60) as raw:
            raw.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            received, reads = b"", 0
            while b"finish_reason" not in received:
                received += raw.recv(65536)
                reads += 1
        return reads

    wait_for(lambda: num_reads() > 3, "an answer in more than three reads")
