"""A live server on a folder with a probe, a capped context and one broken weight."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest

from app.text import TextCodec

from .commands import run_app
from .conftest import TinyModel
from .edits import copy_of, weight_of
from .folders import make_probe
from .live import LiveServer
from .test_probe import TOKENS

LIMIT, NOTE = 100, "longrope: served up to its short side"
PROMPTS = ["the a", "th", "he he"]
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def poison(tiny_phi3: TinyModel) -> str:
    """A letter that no answer to `PROMPTS` holds."""
    codec = TextCodec.load(tiny_phi3.folder)
    prompts = [codec.encode(prompt) for prompt in PROMPTS]
    answers = [tiny_phi3.reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    said = set().union(TOKENS, *prompts, *answers)
    return next(letter for letter in ascii_lowercase if codec.encode(letter)[-1] not in said)


@pytest.fixture(scope="module")
def folder(tiny_phi3: TinyModel, poison: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whoever says `poison` gets NaN for logits; phi3's embedding is not its LM head."""
    folder = copy_of(
        tiny_phi3.folder,
        tmp_path_factory.mktemp("trust"),
        probe=make_probe(tiny_phi3.folder, TOKENS),
        context_length=LIMIT,
        context_note=NOTE,
    )
    poisoned = TextCodec.load(folder).encode(poison)[-1]
    weight_of(folder, "model.embed_tokens.weight")[poisoned] = np.nan
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(folder) as server:
        yield server.wait_ready()


def test_info_tells_probe_ends_and_the_capped_context(server: LiveServer) -> None:
    info = server.get("/info").json()
    assert info["probe"] == "passed"
    assert (info["context_length"], info["max_model_len"]) == (LIMIT, LIMIT)
    assert (info["warnings"], info["precision_mismatch"]) == ([NOTE], False)
    assert len(info["eos_token_ids"]) == 2  # <|endoftext|>, and <|end|> of the template


def test_capped_context_is_the_limit_of_a_request(server: LiveServer) -> None:
    refused = server.post(prompt="a", max_tokens=LIMIT)
    assert refused.status_code == 400
    assert f"the context of {LIMIT} tokens" in refused.json()["error"]["message"]


def test_model_len_above_the_capped_context_is_refused_with_both_numbers(folder: Path) -> None:
    result = run_app("--port", "0", "--max-model-len", str(LIMIT + 1), model=folder)
    assert result.returncode == 2
    assert "MAX_MODEL_LEN" in result.stderr
    message = " ".join(result.stderr.split())
    assert f"{LIMIT + 1} is more than the model's context of {LIMIT} tokens ({NOTE})" in message


def test_request_that_turns_the_logits_into_nan_fails_alone(
    server: LiveServer, poison: str
) -> None:
    """With real neighbours, and its row is used again afterwards."""
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    alone = [server.generate(prompt, **options)["text"] for prompt in PROMPTS]
    before = server.metric("non_finite_logits_total")
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(server.generate, prompt, **options) for prompt in PROMPTS]
        bad = pool.submit(server.post, prompt=f"a {poison}", **options)
        assert [future.result()["text"] for future in good] == alone
    assert bad.result().status_code == 500
    assert bad.result().json()["error"]["code"] == "model_failure"
    assert server.metric("non_finite_logits_total") == before + 1
    assert server.get("/health/ready").status_code == 200
    assert [server.generate(prompt, **options)["text"] for prompt in PROMPTS] == alone
