"""The part of `check` about tokenizer, end tokens and chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import Phi3Config

from quantize.check_text import check_text
from quantize.model_folder import read_folder
from quantize.report import Level, Report

from .edits import edit_json
from .tiny_tokenizers import PHI3_SPECIALS, byte_level_tokenizer, sentencepiece_tokenizer

VOCAB = 32064  # Phi-3's, wider than its tokenizer
# Ids of Phi-3's control tokens; what lies between are placeholders.
PHI3_IDS = {"<|endoftext|>": 32000, "<|assistant|>": 32001, "<|system|>": 32006, "<|end|>": 32007}
PHI3_IDS |= {"<|user|>": 32010}


@pytest.fixture
def folder(phi3_text: Path, tmp_path: Path) -> Path:
    return shutil.copytree(phi3_text, tmp_path / "folder")


@pytest.fixture(scope="module")
def phi3_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything but a graph: a tokenizer and configs with Phi-3's ids."""
    folder = tmp_path_factory.mktemp("phi3-text")
    sentencepiece_tokenizer().save_pretrained(folder)
    number_as_phi3(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "<|endoftext|>",
                "pad_token": "<|endoftext|>",
                "unk_token": "<unk>",
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    (folder / "special_tokens_map.json").unlink()
    Phi3Config(vocab_size=VOCAB, eos_token_id=32000, pad_token_id=32000).save_pretrained(folder)
    edit_json(folder / "generation_config.json", eos_token_id=[32000, 32001, 32007])
    return folder


def number_as_phi3(path: Path) -> None:
    content = json.loads(path.read_text())
    words: dict[str, int] = content["model"]["vocab"]
    words |= {f"word{id_}": id_ for id_ in range(len(words), 32000)}
    [specimen] = [t for t in content["added_tokens"] if t["content"] == PHI3_SPECIALS[0]]
    names = {id_: name for name, id_ in PHI3_IDS.items()}
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] not in PHI3_SPECIALS
    ] + [
        specimen | {"id": id_, "content": names.get(id_, f"<|placeholder{id_}|>")}
        for id_ in range(32000, 32011)
    ]
    path.write_text(json.dumps(content))


def found(folder: Path, level: Level, vocab_size: int = VOCAB) -> list[str]:
    report = Report()
    read = read_folder(folder, Report())  # there is no graph, which is not asked here
    check_text(read, vocab_size, report)
    return [f"{f.about}: {f.text}" for f in report.findings if f.level == level]


def test_phi3_ends_at_the_union_of_what_its_files_name(folder: Path) -> None:
    assert found(folder, "error") == []
    assert found(folder, "warning") == []
    [line] = [line for line in found(folder, "ok") if line.startswith("eos")]
    assert line == (
        "eos: an answer ends at 32000, 32001, 32007: tokenizer 32000; config.json 32000; "
        "generation_config.json 32000, 32001, 32007; chat template 32007"
    )


@pytest.mark.parametrize(
    ("eos", "union"),
    [([32000], "32000, 32007"), (32001, "32000, 32001, 32007"), (None, "32000, 32007")],
    ids=["list of one", "single id", "none"],
)
def test_turn_end_of_the_template_counts_whatever_generation_config_says(
    eos: Any, union: str, folder: Path
) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=eos)
    [warning] = found(folder, "warning")
    assert warning.startswith(f"eos: an answer ends at any of {union}, but no file names them all")


def test_sources_that_agree_are_good(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", eos_token="<|end|>")
    edit_json(folder / "config.json", eos_token_id=32007)
    edit_json(folder / "generation_config.json", eos_token_id=32007)
    assert found(folder, "warning") == []
    assert any(line.startswith("eos: an answer ends at 32007:") for line in found(folder, "ok"))


def test_end_token_beyond_the_vocabulary_is_an_error(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[32007, 40000])
    [error] = found(folder, "error")
    assert error == f"eos: end tokens 40000 lie beyond the graph's vocabulary of {VOCAB}"


def test_end_token_that_is_no_id_is_an_error(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=["</s>"])
    [error] = found(folder, "error")
    assert "generation_config.json has ['</s>'] for eos_token_id" in error


def test_no_end_token_anywhere_is_an_error(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    edit_json(folder / "config.json", eos_token_id=None)
    [error] = found(folder, "error")
    assert error.startswith("eos: no end token is named anywhere")


def test_added_tokens_beyond_the_graphs_vocabulary_that_a_chat_needs_are_an_error(
    folder: Path,
) -> None:
    assert found(folder, "error", vocab_size=32008) == [
        "tokenizer: 1 tokens lie beyond the graph's vocabulary of 32008, the first is "
        "'<|user|>' with id 32010"
    ]


def test_added_tokens_beyond_the_graphs_vocabulary_that_nothing_needs_are_a_warning(
    folder: Path,
) -> None:
    (folder / "chat_template.jinja").write_text(TURNS)
    assert found(folder, "error", vocab_size=32008) == []
    [warning] = [
        line for line in found(folder, "warning", vocab_size=32008) if "tokenizer" in line[:9]
    ]
    assert warning.startswith(
        "tokenizer: 3 tokens lie beyond the graph's vocabulary of 32008, the first is "
        "'<|placeholder32008|>' with id 32008"
    )


def test_base_vocabulary_beyond_the_graphs_is_an_error(folder: Path) -> None:
    errors = found(folder, "error", vocab_size=31000)
    assert any("the first is 'word31000' with id 31000" in line for line in errors)


def test_missing_template_is_a_warning(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert any("there is no chat template" in line for line in found(folder, "warning"))


TURNS = "{% for m in messages %}{{ m['role'] + m['content'] + '<|end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "level", "says"),
    [
        (TURNS, "ok", "system is supported"),
        (
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}"
            "{% endif %}" + TURNS,
            "warning",
            "not supported, it refuses them: no system role",
        ),
        (
            TURNS.replace("messages %}", "messages if m['role'] != 'system' %}"),
            "warning",
            "it drops them in silence",
        ),
        ("{{ messages[0]['content'] }}", "error", "leaves messages out: text-of-the-assistant"),
        ("{% for m in messages %}", "error", "it cannot render a chat"),
    ],
    ids=["supported", "refused", "dropped", "answers left out", "not a template"],
)
def test_template_is_rendered_and_system_messages_are_tried(
    template: str, level: Level, says: str, folder: Path
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    [line] = [line for line in found(folder, level) if line.startswith("template")]
    assert says in line


def test_tokenizer_that_loses_spaces_is_an_error(folder: Path) -> None:
    """SentencePiece-style pre-tokenization around a byte-level vocabulary, as from a GGUF file."""
    byte_level_tokenizer().save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    [error] = [line for line in found(folder, "error") if line.startswith("tokenizer")]
    assert "double spaces ('a  b   c' becomes 'a b c')" in error


def test_folder_without_a_fast_tokenizer_is_told_so(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    [error] = found(folder, "error")
    assert error == "tokenizer: tokenizer.json is missing: a fast tokenizer is needed"


def test_broken_tokenizer_file_is_one_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    [error] = found(folder, "error")
    assert error.startswith("tokenizer: it cannot be loaded")
