"""Shared prefixes with real graphs, over the service, and in the default model's conversations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from app.api import create_app
from app.engine import Engine
from app.keys import read_pairs

from .conftest import Bring, TinyModel
from .engines import answers, greedy, loaded_service, real_engine, run
from .folders import make_portable
from .live import ROOT, LiveServer
from .logits import ids_of_length
from .services import SETTINGS, StubService, running
from .test_longrope import ORIGINAL, phi3_long

__all__ = ["phi3_long"]

LONG = "Tell me of the sea, of ships and of those who sail on them, in a story of some length."


def conversations(engine: Engine) -> list[list[int]]:
    """Four that take turns side by side, of several lengths; three of them begin alike."""
    said: list[list[int]] = []
    prompts = [ids_of_length(20, seed=s) + [5 + i] * (2 + i) for i, s in enumerate((1, 1, 1, 2))]
    for turn in range(3):
        found = answers(
            engine, [greedy(str(i), p, 4 + 3 * i + turn) for i, p in enumerate(prompts)]
        )
        said += found
        prompts = [[*p, *ids, 7, 8, 9] for p, ids in zip(prompts, found, strict=True)]
    return said


@pytest.mark.parametrize("form", ["fused", "portable"])
def test_answers_are_those_that_come_without_the_cache(
    form: str, tiny_llama: TinyModel, bring: Bring
) -> None:
    folder = tiny_llama.folder if form == "fused" else bring(make_portable, tiny_llama.source)
    engine = real_engine(folder, min_shared=4)
    assert conversations(engine) == conversations(real_engine(folder))
    again = greedy("again", ids_of_length(20, seed=2) + [5 + 3] * 5)
    assert answers(engine, [again]) and again.num_reused >= 20  # they were not all read anew


@pytest.mark.parametrize("length", [24, 28, 31])
def test_prefix_up_to_the_longrope_cap_gives_the_answer_of_transformers(
    phi3_long: TinyModel, length: int
) -> None:
    """There the context ends, so no prefix was rotated by other factors."""
    engine = real_engine(phi3_long.folder, max_model_len=ORIGINAL, min_shared=4)
    prompt = ids_of_length(length)
    for _ in range(2):
        sequence = greedy(str(length), prompt, ORIGINAL - length)
        engine.submit(sequence)
        run(engine)
        expected = phi3_long.reference.greedy(prompt, ORIGINAL - length)
        assert sequence.output_ids == expected
    assert sequence.num_reused == length - 2


@pytest.mark.parametrize(
    ("arguments", "is_on"),
    [([], True), (["--prefix-cache", "false"], False), (["--deterministic", "true"], False)],
    ids=str,
)
def test_settings_turn_it_off(arguments: list[str], is_on: bool, tiny_llama: TinyModel) -> None:
    service = loaded_service(tiny_llama.folder, *arguments)
    assert service.current.loaded is not None
    assert service.current.loaded.info["prefix_cache"] is is_on


def cached(answer: dict[str, Any]) -> int:
    number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def test_one_api_key_learns_nothing_of_what_another_has_sent() -> None:
    keys = {name: {"Authorization": f"Bearer {name}-secret"} for name in ("ann", "bob")}
    pairs = read_pairs("ann:ann-secret,bob:bob-secret")
    with running(StubService(replace(SETTINGS, api_keys=pairs))) as service:
        client = create_app(service).test_client()
        body = {"prompt": "The sea, and ships on it", "max_tokens": 5, "ignore_eos": True}

        def ask(name: str) -> int:
            answer = client.post("/generate", json=body, headers=keys[name]).get_json()
            return cached(answer)

        assert [ask("ann"), ask("bob"), ask("ann") > 0, ask("bob") > 0] == [0, 0, True, True]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    folder = ROOT / "models" / "default"
    assert folder.is_dir(), "run `make model` first (`make test` does)"
    with LiveServer(folder) as server:
        yield server.wait_ready()


@pytest.mark.slow
def test_conversation_reads_none_of_its_history_again(server: LiveServer) -> None:
    """The answers, written out and tokenized once more, are the tokens that were generated."""
    asked = ["What is the capital of France?", "And of Italy? Count to 12 first.", "Write a haiku."]
    messages = [{"role": "system", "content": LONG}]
    before = 0
    for question in asked:
        messages.append({"role": "user", "content": question})
        answer = server.post(
            "/v1/chat/completions", messages=messages, max_tokens=60, temperature=0
        ).json()
        # The last token that was generated, an end token too, has no key yet.
        assert cached(answer) >= before - 1
        before = answer["usage"]["total_tokens"]
        messages.append(answer["choices"][0]["message"])
    assert server.metric("prefix_cache_hit_tokens_total") > 100


@pytest.mark.slow
def test_prompt_that_is_asked_again_gets_the_same_answer(server: LiveServer) -> None:
    first, *others = [server.generate(LONG * 5, max_tokens=30, temperature=0) for _ in range(3)]
    assert [other["text"] for other in others] == [first["text"]] * 2
    assert all(cached(other) == other["usage"]["prompt_tokens"] - 2 for other in others)
