"""Phi-3 128k on a small scale: original context 32, and 128 in config.json. The served engine
against transformers up to the end of the short factors (FR06, FR21)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.text import TextCodec
from quantize.export import read_config
from quantize.rotary import context_limit, rotary_caches

from .conftest import Build, TinyModel
from .edits import edit_json
from .engines import greedy, real_engine, run
from .logits import ids_of_length
from .tiny import TorchReference, make_phi3
from .tiny_families import ORIGINAL, make_family


@pytest.fixture(scope="module")
def phi3_long(build_folder: Build, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    source = make_family("phi3.5-128k", tmp_path_factory.mktemp("long"))
    return TinyModel(source, build_folder(source, "fp32"), TorchReference(source))


@pytest.mark.parametrize("total", [8, 31, 32])
def test_answer_is_that_of_transformers_up_to_the_cap(phi3_long: TinyModel, total: int) -> None:
    prompt = ids_of_length(total - 4)
    engine = real_engine(phi3_long.folder, prefill_chunk=5, max_model_len=ORIGINAL)
    sequence = greedy("one", prompt, num_tokens=4)
    engine.submit(sequence)
    run(engine)
    assert sequence.output_ids == phi3_long.reference.greedy(prompt, 4)


def test_rows_that_reach_the_cap_together_give_the_answers_of_transformers(
    phi3_long: TinyModel,
) -> None:
    engine = real_engine(phi3_long.folder, max_model_len=ORIGINAL)
    sequences = [
        greedy(str(length), ids_of_length(length), num_tokens=ORIGINAL - length)
        for length in (24, 28, 31)
    ]
    for sequence in sequences:
        engine.submit(sequence)
    run(engine)
    for sequence in sequences:
        expected = phi3_long.reference.greedy(
            sequence.prompt_ids, ORIGINAL - len(sequence.prompt_ids)
        )
        assert sequence.output_ids == expected


def test_limit_is_the_original_context_and_says_why(phi3_long: TinyModel) -> None:
    limit = context_limit(read_config(phi3_long.source))
    assert limit is not None
    assert limit[0] == ORIGINAL
    assert "longrope" in limit[1] and "128" in limit[1]


def test_limit_is_noted_in_the_folder(phi3_long: TinyModel) -> None:
    record = json.loads((phi3_long.folder / "quantization.json").read_text())
    limit = record["context_length"], record["context_note"]
    assert limit == context_limit(read_config(phi3_long.source))


def test_model_without_longrope_has_no_limit(tiny_phi3: TinyModel) -> None:
    assert context_limit(read_config(tiny_phi3.source)) is None
    assert "context_length" not in (tiny_phi3.folder / "quantization.json").read_text()


def test_attention_scaling_of_longrope_is_in_the_caches(phi3_long: TinyModel) -> None:
    """sqrt(1 + ln(128 / 32) / ln 32), at position 0 where the cosine is 1."""
    cos = rotary_caches(read_config(phi3_long.source))["cos_cache"]
    assert cos[0].tolist() == pytest.approx([1.4**0.5] * 8)


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_old_names_of_longrope_mean_the_same(
    phi3_long: TinyModel, kind: str, tmp_path: Path
) -> None:
    fields = json.loads((phi3_long.source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields))
    edit_json(tmp_path / "config.json", rope_scaling=fields["rope_scaling"] | {"type": kind})
    limit = context_limit(read_config(tmp_path))
    assert limit is not None and limit[0] == ORIGINAL


def test_every_end_token_of_the_source_ends_an_answer(build_folder: Build, tmp_path: Path) -> None:
    """Phi-3: 32000 in config.json, a list of three in generation_config.json (FR20)."""
    source = make_phi3(tmp_path / "source")
    tokenizer_end, end, user = 290, 297, 296
    written = {"eos_token_id": [end, user, tokenizer_end]}
    (source / "generation_config.json").write_text(json.dumps(written))
    folder = build_folder(source, "fp32")
    assert json.loads((folder / "generation_config.json").read_text()) == written
    assert TextCodec.load(folder).eos_ids >= {end, user, tokenizer_end}
