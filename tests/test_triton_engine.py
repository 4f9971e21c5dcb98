"""Our engine inside a real tritonserver: one batch for all, streams, cancellation, errors, memory.

Besides what Triton answers, its metrics tell what the engine did: they are ours.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as triton
from make_triton_repo import make_repository
from tritonclient.utils import InferenceServerException

from .conftest import DEFAULT_FOLDER
from .live import LiveServer, wait_for
from .triton import TritonServer

ROWS, QUEUED = 16, 16
ANIMALS = ["cat", "dog", "sea bird", "horse", "mouse", "lion", "bear", "wolf"]
PROMPTS = [f"{begin} {animal}" for begin in ("Once upon a time a", "The") for animal in ANIMALS]
TOKENS = 16
LONG = {"max_tokens": 1000, "sampling_parameters": json.dumps({"ignore_eos": True})}
TYPES = {bool: "BOOL", int: "INT32", float: "FP32", str: "BYTES", list: "BYTES"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    make_repository(DEFAULT_FOLDER, repository, link=True)
    settings = {"MAX_BATCH_SIZE": str(ROWS), "MAX_QUEUED_REQUESTS": str(QUEUED)}
    with TritonServer(repository, "--model-config-name=cpu", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def texts(default_server: LiveServer) -> list[str]:
    """What our own server says to each of PROMPTS."""

    def ask(prompt: str) -> str:
        return str(default_server.generate(prompt, max_tokens=TOKENS)["text"])

    with ThreadPoolExecutor(ROWS) as threads:
        return list(threads.map(ask, PROMPTS))


@pytest.fixture
def client(server: TritonServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc) as made:
        yield made


def inputs(text: str, **more: Any) -> list[triton.InferInput]:
    made = []
    for name, value in {"text_input": text, **more}.items():
        kind = TYPES[type(value)]
        dtype = {"BYTES": object, "FP32": np.float32, "INT32": np.int32, "BOOL": bool}[kind]
        array = np.array(value, dtype=dtype).reshape(1, -1)
        tensor = triton.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def value(result: Any, name: str) -> Any:
    found = result.as_numpy(name).item()
    return found.decode() if isinstance(found, bytes) else found


class Stream:
    """Over gRPC, of one request. `texts` come as they come; None is the end, or `error` is."""

    def __init__(self, address: str, text: str, **more: Any) -> None:
        self.error: InferenceServerException | None = None
        self.last: Any = None
        self._arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.client = triton.InferenceServerClient(address)
        self.client.start_stream(self._hear)
        self.client.async_stream_infer(
            "phi3_mini",
            inputs(text, stream=True, **more),
            enable_empty_final_response=True,
        )

    def _hear(self, result: Any, error: InferenceServerException | None) -> None:
        if error is not None:
            self.error = error
            self._arrived.put(None)
            return
        if result.as_numpy("text_output") is not None:
            self._arrived.put(value(result, "text_output"))
        if result.as_numpy("finish_reason") is not None:
            self.last = result
            self._arrived.put(None)

    def texts(self) -> Iterator[str]:
        while (text := self._arrived.get(timeout=60)) is not None:
            yield text

    def leave(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def close(self) -> None:
        self.client.stop_stream()
        self.client.close()


def sse(server: TritonServer, text: str, **more: Any) -> Iterator[dict[str, Any]]:
    """Over HTTP. Closing the iterator closes the connection."""
    url = f"{server.url}/v2/models/phi3_mini/generate_stream"
    body = {"text_input": text, "stream": True, **more}
    headers = {"Connection": "close"}
    with requests.post(url, json=body, stream=True, headers=headers, timeout=60) as response:
        for line in response.iter_lines():
            if line:
                yield json.loads(line.removeprefix(b"data: "))


def grpc_texts(server: TritonServer, text: str) -> Iterator[str]:
    stream = Stream(server.grpc, text, max_tokens=TOKENS)
    yield from stream.texts()
    stream.close()


def http_texts(server: TritonServer, text: str) -> Iterator[str]:
    for event in sse(server, text, max_tokens=TOKENS):
        yield event["text_output"]


@pytest.mark.parametrize("read", [grpc_texts, http_texts])
def test_sixteen_streams_progress_together_and_say_what_our_server_says(
    read: Callable[[TritonServer, str], Iterator[str]], server: TritonServer, texts: list[str]
) -> None:
    """Each waits behind its first text for those of all others."""
    all_begun = threading.Barrier(ROWS)

    def ask(prompt: str) -> str:
        pieces = read(server, prompt)
        text = next(pieces)
        all_begun.wait(60)
        return text + "".join(pieces)

    steps = server.metric("phi_serve_step_duration_seconds_count")
    with ThreadPoolExecutor(ROWS) as threads:
        assert list(threads.map(ask, PROMPTS)) == texts
    # The metrics are told once a second.
    wait_for(lambda: server.metric("phi_serve_step_duration_seconds_count") > steps, "metrics")
    wait_for(lambda: server.metric("phi_serve_num_requests_running") == 0, "the end of all")
    assert server.metric("phi_serve_step_duration_seconds_count") - steps < ROWS * TOKENS / 2


def test_models_that_answer_once_share_the_engines_batch(
    server: TritonServer, client: triton.InferenceServerClient, texts: list[str]
) -> None:
    def over_grpc(prompt: str) -> str:
        result = client.infer("phi3_mini_once", inputs(prompt, max_tokens=TOKENS))
        return str(value(result, "text_output"))

    def over_http(prompt: str) -> str:
        body = {"text_input": prompt, "max_tokens": TOKENS}
        response = server.post("/v2/models/phi3_mini_once/generate", **body)
        return str(response.json()["text_output"])

    with ThreadPoolExecutor(ROWS) as threads:
        half = ROWS // 2
        answers = [
            *threads.map(over_grpc, PROMPTS[:half]),
            *threads.map(over_http, PROMPTS[half:]),
        ]
    assert answers == texts


def test_answer_has_its_reason_and_counts_of_tokens(
    server: TritonServer, client: triton.InferenceServerClient, default_server: LiveServer
) -> None:
    own = default_server.generate(PROMPTS[0], max_tokens=5)
    result = client.infer("phi3_mini_once", inputs(PROMPTS[0], max_tokens=5))
    stream = Stream(server.grpc, PROMPTS[0], max_tokens=5)
    assert "".join(stream.texts()) == own["text"]
    stream.close()
    for answer in (result, stream.last):
        assert value(answer, "finish_reason") == own["finish_reason"] == "length"
        assert value(answer, "prompt_tokens") == own["usage"]["prompt_tokens"]
        assert value(answer, "completion_tokens") == own["usage"]["completion_tokens"] == 5


def test_sampling_inputs_are_generates_fields(
    server: TritonServer, default_server: LiveServer
) -> None:
    more = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 11, "max_tokens": 24}
    own = default_server.generate(PROMPTS[0], **more, stop=[" the"], logit_bias={"30": -5})
    for url in ("phi3_mini/generate", "phi3_mini_once/generate"):
        answer = server.post(
            f"/v2/models/{url}",
            text_input=PROMPTS[0],
            stop_words=[" the"],
            sampling_parameters=json.dumps({"logit_bias": {"30": -5}}),
            **more,
        ).json()
        assert (answer["text_output"], answer["finish_reason"]) == (
            own["text"],
            own["finish_reason"],
        )


def test_cancel_over_grpc_frees_the_slot_at_the_next_token(server: TritonServer) -> None:
    aborted = server.metric('phi_serve_request_success_total{finish_reason="abort"}')
    generated = server.metric("phi_serve_generation_tokens_total")
    stream = Stream(server.grpc, PROMPTS[0], **LONG)
    texts = stream.texts()
    for _ in range(3):
        next(texts)
    stream.leave()
    wait_for_abort(server, aborted, generated)


def test_closing_the_http_stream_frees_the_slot_at_the_next_token(server: TritonServer) -> None:
    aborted = server.metric('phi_serve_request_success_total{finish_reason="abort"}')
    generated = server.metric("phi_serve_generation_tokens_total")
    events = sse(server, PROMPTS[0], **LONG)
    for _ in range(3):
        next(events)
    events.close()  # type: ignore[attr-defined]
    wait_for_abort(server, aborted, generated)


def test_cancel_of_a_unary_call_frees_the_slot(
    server: TritonServer, client: triton.InferenceServerClient
) -> None:
    aborted = server.metric('phi_serve_request_success_total{finish_reason="abort"}')
    generated = server.metric("phi_serve_generation_tokens_total")
    errors: queue.SimpleQueue[Any] = queue.SimpleQueue()
    call = client.async_infer(
        "phi3_mini_once",
        inputs(PROMPTS[0], **LONG),
        callback=lambda result, error: errors.put(error),
    )
    wait_for(lambda: server.metric("phi_serve_num_requests_running") == 1, "a row")
    call.cancel()
    assert "cancel" in str(errors.get(timeout=60)).lower()
    wait_for_abort(server, aborted, generated)


def wait_for_abort(server: TritonServer, aborted: float, generated: float) -> None:
    """One more than `aborted` has been; it has not generated what it was to."""
    name = 'phi_serve_request_success_total{finish_reason="abort"}'
    wait_for(lambda: server.metric(name) == aborted + 1, "the end of the request")
    assert server.metric("phi_serve_num_requests_running") == 0
    assert server.metric("phi_serve_generation_tokens_total") - generated < 900


def test_more_than_may_wait_is_refused_at_once(server: TritonServer) -> None:
    streams = [Stream(server.grpc, prompt, **LONG) for prompt in PROMPTS]
    for stream in streams:
        next(stream.texts())
    waiting = [Stream(server.grpc, "a", **LONG) for _ in range(QUEUED)]
    name = "phi_serve_num_requests_waiting"
    wait_for(lambda: server.metric(name) == QUEUED, "a full queue")
    refused = server.post("/v2/models/phi3_mini/generate", text_input="a")
    for stream in (*waiting, *streams):
        stream.leave()
    assert refused.status_code != 200
    assert "(MAX_QUEUED_REQUESTS)" in refused.json()["error"]
    wait_for(lambda: server.metric("phi_serve_num_requests_running") == 0, "empty rows")
    wait_for(lambda: server.metric(name) == 0, "an empty queue")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 1}, "text_input: is required"),
    ({"text_input": ""}, "text_input: String should have at least 1 character"),
    ({"text_input": "a", "max_tokens": 0}, "max_tokens: Input should be greater than"),
    ({"text_input": "a", "max_tokens": 10**9}, "max_tokens: 1000000000 is too much"),
    ({"text_input": "a " * 9000}, "text_input: "),
    ({"text_input": "a", "temperature": 3.0}, "temperature: Input should be less than"),
    ({"text_input": "a", "stop_words": [""]}, "stop_words[0]: "),
    ({"text_input": "a", "sampling_parameters": "{"}, "sampling_parameters: it is not valid JSON"),
    ({"text_input": "a", "sampling_parameters": '{"x": 1}'}, "x: not a field"),
    ({"text_input": "a", "seed": 1, "random_seed": 2}, "seed: is given twice"),
    ({"text_input": "a", "sampling_parameters": '{"n": 2}'}, "n: a request has one answer"),
]


@pytest.mark.parametrize("model", ["phi3_mini", "phi3_mini_once"])
@pytest.mark.parametrize(("body", "message"), BAD)
def test_bad_request_is_told_what_is_wrong(
    model: str, body: dict[str, Any], message: str, server: TritonServer
) -> None:
    response = server.post(f"/v2/models/{model}/generate", **body)
    assert response.status_code == 400
    assert response.json()["error"].startswith(message)


def test_bad_request_of_a_stream_ends_it_with_an_error(server: TritonServer) -> None:
    stream = Stream(server.grpc, "a", max_tokens=0)
    assert list(stream.texts()) == []
    assert "max_tokens: " in str(stream.error)
    stream.close()
    [event] = sse(server, "a", max_tokens=0)
    assert event["error"].startswith("max_tokens: ")


def test_five_hundred_bad_requests_leave_shared_memory_and_memory_flat(
    server: TritonServer,
) -> None:
    def ask(number: int) -> None:
        model = ("phi3_mini", "phi3_mini_once")[number % 2]
        body, _ = BAD[number % len(BAD)]
        assert server.post(f"/v2/models/{model}/generate", **body).status_code == 400

    def all_of(numbers: range) -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, numbers))

    all_of(range(100))  # what comes but once
    shared, memory = server.shared_memory, server.memory
    all_of(range(500))
    assert server.shared_memory == shared
    assert server.memory - memory < 16 << 20


def test_sigterm_ends_cleanly_and_lets_open_streams_end(server: TritonServer) -> None:
    """The last test here: the server is gone then."""
    stream = Stream(server.grpc, PROMPTS[0], max_tokens=60)
    texts = stream.texts()
    next(texts)
    ending = ThreadPoolExecutor(1).submit(server.stop)
    assert len(list(texts)) > 20
    assert value(stream.last, "finish_reason") in ("length", "stop")
    stream.close()
    assert ending.result(60) == 0
    assert server.shared_memory == 0
    assert "failed" not in server.log
