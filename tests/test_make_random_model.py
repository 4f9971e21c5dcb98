"""The random model is a Phi-3 for transformers, weights and tokenizer alike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3ForCausalLM

from scripts.make_random_model import PHI3_MINI, PHI3_TINY, list_weights, main, make_model

SMALL_SHARD = 200_000  # bytes: the largest tensor of the tiny model and little more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    make_model(folder, PHI3_TINY, max_shard_bytes=SMALL_SHARD)
    return folder


def test_transformers_finds_every_weight_in_its_shard(folder: Path) -> None:
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert isinstance(model, Phi3ForCausalLM)
    assert model.dtype == torch.bfloat16
    assert not any(found.values()), found
    shards = [*folder.glob("*.safetensors")]
    assert len(shards) > 2
    assert max(shard.stat().st_size for shard in shards) < SMALL_SHARD + 2000


def test_logits_are_of_ordinary_size(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(3, 300)[None]).logits
    assert 0.5 < logits.std() < 3


def test_phi3_mini_has_the_number_of_parameters_of_phi_3_mini() -> None:
    assert sum(math.prod(weight.shape) for weight in list_weights(PHI3_MINI)) == 3_821_079_552


def test_tokenizer_has_the_special_ids_and_the_template_of_phi_3(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = PHI3_TINY["vocab_size"] - 64  # 32000 in the true size
    specials = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
    ids = tokenizer.convert_tokens_to_ids(specials)
    assert [id_ - first for id_ in ids] == [0, 1, 6, 7, 10]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [first + 7, first + 1, first]
    messages = [{"role": "system", "content": "Zoë says"}, {"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>\nZoë says<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n"
    text = "Was für ein Tag, 1 + 1 = 2 ☀"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_seed_fixes_the_weights(folder: Path, tmp_path: Path) -> None:
    (again := tmp_path / "again").mkdir()
    make_model(again, PHI3_TINY, max_shard_bytes=SMALL_SHARD)
    assert all(
        shard.read_bytes() == (again / shard.name).read_bytes()
        for shard in folder.glob("*.safetensors")
    )


def test_command_writes_what_it_is_asked_for_and_never_over_a_folder(tmp_path: Path) -> None:
    arguments = ["--like", "phi3-tiny", "--layers", "1", "--dtype", "float16"]
    arguments += ["--output", str(tmp_path / "model")]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["torch_dtype"]) == (1, "float16")
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 2
    assert "exists already" in again.output


def test_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    done = CliRunner().invoke(main, ["--like", "phi3-mini", "--output", str(tmp_path / "model")])
    assert done.exit_code == 1
    assert "7,642,159,104 bytes needed, 1,000 free" in done.output
    assert not (tmp_path / "model").exists()
