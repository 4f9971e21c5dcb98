"""A whole model repository on a real tritonserver: logits with dynamic batching, the ensemble, and
the client of all of it.

A stand-in for the ONNX Runtime backend, which the PyPI wheel has not, runs the very config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton_client
import tritonclient.grpc as triton
from click.testing import CliRunner, Result
from make_triton_repo import make_repository
from triton_lint import lint

from app.graph import read_graph
from app.text import TextCodec

from .conftest import TinyModel
from .live import ROOT, wait_for
from .triton import TritonServer, needs_triton

PROMPTS = ["a", "some words", "a longer row of words, and more of them", "four"]


@pytest.fixture(scope="module")
def repository(tiny_phi3: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tiny_phi3.folder, tmp_path_factory.mktemp("all"), engine_only=False)


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backends")
    [installed] = needs_triton().parent.glob("lib/*/site-packages/*/tritonserver/backends/python")
    (folder / "python").symlink_to(installed)
    (folder / "onnxruntime").symlink_to(ROOT / "tests" / "triton_backends" / "onnxruntime")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, backends: Path) -> Iterator[TritonServer]:
    options = [f"--backend-directory={backends}", "--model-config-name=cpu"]
    with TritonServer(repository, *options, seconds=240) as running:
        yield running


@pytest.fixture
def client(server: TritonServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc) as made:
        yield made


@pytest.fixture(scope="module")
def codec(tiny_phi3: TinyModel) -> TextCodec:
    return TextCodec.load(tiny_phi3.folder)


def tensor(name: str, kind: str, values: Any) -> triton.InferInput:
    dtype = {"BYTES": object, "INT64": np.int64, "FP32": np.float32, "UINT64": np.uint64}[kind]
    array = np.array(values, dtype)
    made = triton.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


def logits_of(client: triton.InferenceServerClient, rows: list[list[int]]) -> Any:
    ones = [[1] * len(row) for row in rows]
    inputs = [tensor("input_ids", "INT64", rows), tensor("attention_mask", "INT64", ones)]
    return client.infer("phi3_mini_logits", inputs).as_numpy("logits")


def batches(client: triton.InferenceServerClient) -> Counter[int]:
    """How many runs of each size there have been."""
    [stats] = client.get_inference_statistics("phi3_mini_logits").model_stats
    return Counter({each.batch_size: each.compute_infer.count for each in stats.batch_stats})


def ask_together(client: triton.InferenceServerClient, rows: list[list[int]]) -> Counter[int]:
    """One request for each of `rows`, all at once; how many runs of each size that took."""
    before = batches(client)
    with ThreadPoolExecutor(len(rows)) as threads:
        list(threads.map(lambda row: logits_of(client, [row]), rows))
    # They are counted a moment behind the answer.
    found = [Counter[int]()]

    def are_counted() -> bool:
        found[0] = batches(client) - before
        return sum(size * number for size, number in found[0].items()) >= len(rows)

    wait_for(are_counted, "the statistics")
    return found[0]


def test_what_is_written_has_nothing_wrong_with_it(repository: Path) -> None:
    assert lint(repository) == []


def test_the_config_has_the_graphs_own_vocabulary_and_type(
    repository: Path, tiny_phi3: TinyModel, client: triton.InferenceServerClient
) -> None:
    vocab_size = read_graph(tiny_phi3.folder).vocab_size
    config = client.get_model_config("phi3_mini_logits").config
    [logits] = config.output
    assert (list(logits.dims), logits.data_type) == ([1, vocab_size], 11)  # TYPE_FP32
    assert config.instance_group[0].kind == 2  # KIND_CPU


def test_logits_are_those_of_torch(
    client: triton.InferenceServerClient, tiny_phi3: TinyModel
) -> None:
    ids = [5, 17, 33, 60, 9]
    expected = tiny_phi3.reference.logits(ids)[-1].numpy()
    np.testing.assert_allclose(logits_of(client, [ids])[0, 0], expected, atol=1e-3)


def test_requests_of_one_length_share_runs(client: triton.InferenceServerClient) -> None:
    rows = [[5, 17, number] for number in range(10, 26)]
    alone = [logits_of(client, [row])[0] for row in rows]
    sizes: Counter[int] = Counter()

    def have_merged() -> bool:  # how many do is a matter of when they come
        sizes.update(ask_together(client, rows))
        return max(sizes) > 1

    wait_for(have_merged, "requests that share a run")
    assert max(sizes) <= 8
    with ThreadPoolExecutor(len(rows)) as threads:
        together = list(threads.map(lambda row: logits_of(client, [row])[0], rows))
    np.testing.assert_allclose(together, alone, atol=1e-4)


def test_requests_of_different_lengths_never_share_a_run(
    client: triton.InferenceServerClient,
) -> None:
    rows = [[5] * length for length in range(1, 65)]
    assert ask_together(client, rows) == Counter({1: 64})


def test_the_ensemble_adds_a_token_at_a_time_to_the_greedy_answer(
    server: TritonServer, tiny_phi3: TinyModel, codec: TextCodec
) -> None:
    prompt = "The capital of France is"
    expected = tiny_phi3.reference.greedy(codec.encode(prompt), 6)
    body: dict[str, Any] = {"text_input": prompt}
    for num_tokens in range(1, 7):
        answer = server.post("/v2/models/phi3_mini_ensemble/generate", **body).json()
        output = answer["output_ids"]  # Triton makes a list of one element a number
        body["answer_ids"] = [output] if isinstance(output, int) else output
        assert body["answer_ids"] == expected[:num_tokens]
        assert answer["text_output"] == codec.detokenizer().feed(expected[:num_tokens])
        assert answer["has_ended"] == (expected[num_tokens - 1] in codec.eos_ids)


def test_texts_of_different_lengths_in_one_request_do_not_change_one_another(
    client: triton.InferenceServerClient, tiny_phi3: TinyModel, codec: TextCodec
) -> None:
    texts = tensor("text_input", "BYTES", [[prompt.encode()] for prompt in PROMPTS])
    output = client.infer("phi3_mini_ensemble", [texts]).as_numpy("output_ids")
    alone = [tiny_phi3.reference.greedy(codec.encode(prompt), 1) for prompt in PROMPTS]
    assert output.tolist() == alone


def test_a_seed_determines_what_is_drawn(client: triton.InferenceServerClient) -> None:
    def draw(seed: int) -> int:
        inputs = [
            tensor("text_input", "BYTES", [[b"a"]]),
            tensor("temperature", "FP32", [[2.0]]),
            tensor("seed", "UINT64", [[seed]]),
        ]
        return int(client.infer("phi3_mini_ensemble", inputs).as_numpy("output_ids")[0, 0])

    drawn = [draw(seed) for seed in range(8)]
    assert drawn == [draw(seed) for seed in range(8)]
    assert len(set(drawn)) > 1


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"text_input": "a" * 5000}, "the model takes"),
        ({"text_input": "a", "temperature": 3}, "temperature must be from 0 to 2"),
        ({"text_input": "a", "temperature": 1, "top_p": 0}, "top_p must be above 0"),
        ({"text_input": "a", "top_k": -1}, "top_k must be 0 or more"),
        ({"text_input": "a", "answer_ids": [100000]}, "answer_ids must be from 0 to"),
        ({"temperature": 1}, "in ensemble 'phi3_mini_ensemble'"),  # in Triton's words, a deadlock
        ({"text_input": "a", "max_tokens": 3}, "max_tokens is no input here"),
    ],
)
def test_a_wrong_request_is_told_why(server: TritonServer, body: Any, told: str) -> None:
    response = server.post("/v2/models/phi3_mini_ensemble/generate", **body)
    assert response.status_code >= 400
    assert told in response.json()["error"]


def test_a_mask_of_another_shape_fails_its_request_alone(
    client: triton.InferenceServerClient,
) -> None:
    inputs = [
        tensor("input_ids", "INT64", [[1, 2, 3]]),
        tensor("attention_mask", "INT64", [[1, 1]]),
    ]
    with pytest.raises(triton.InferenceServerException):
        client.infer("phi3_mini_logits", inputs)
    assert np.isfinite(logits_of(client, [[1, 2, 3]])).all()


def run_client(server: TritonServer, *arguments: str) -> Result:
    sockets = ["--grpc", server.grpc, "--http", server.url.removeprefix("http://")]
    return CliRunner().invoke(triton_client.main, [*arguments, *sockets])


def greedy_text(model: TinyModel, codec: TextCodec, prompt: str, num_tokens: int) -> str:
    ids = model.reference.greedy(codec.encode(prompt), num_tokens)
    ends = [at for at, id_ in enumerate(ids) if id_ in codec.eos_ids]
    return codec.detokenizer().feed(ids[: ends[0] if ends else None], is_last=True)


def test_the_client_gets_an_answer_four_and_a_stream(
    server: TritonServer, tiny_phi3: TinyModel, codec: TextCodec
) -> None:
    result = run_client(server, "one", "batch", "stream", "--max-tokens", "6")
    assert result.exit_code == 0, result.output
    first, *others = (repr(greedy_text(tiny_phi3, codec, each, 6)) for each in triton_client.FOUR)
    assert result.output.count(first) == 4
    assert all(other in result.output for other in others)
    assert result.output.count("tokens/s") == 8


def test_the_client_leaves_a_stream(server: TritonServer) -> None:
    result = run_client(server, "cancel", "--max-tokens", "100")
    assert result.exit_code == 0, result.output
    assert "left; the stream was closed" in result.output


def test_the_client_completes_four_texts_by_the_ensemble(
    server: TritonServer, tiny_phi3: TinyModel, codec: TextCodec
) -> None:
    result = run_client(server, "ensemble", "--max-tokens", "3")
    assert result.exit_code == 0, result.output
    for prompt in triton_client.FOUR:
        ids = tiny_phi3.reference.greedy(codec.encode(prompt), 3)
        assert repr(codec.detokenizer().feed(ids)) in result.output
    assert "together: " in result.output and "tokens/s" in result.output


@pytest.mark.parametrize("what", ["one", "batch", "stream", "cancel"])
def test_the_client_says_what_the_server_refuses(server: TritonServer, what: str) -> None:
    result = run_client(server, what, "--max-tokens", "1000000")
    assert result.exit_code == 1
    assert "max_tokens" in result.output and "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
