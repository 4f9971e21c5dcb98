"""Whether system messages reach the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from quantize.chat_template import SYSTEM_WARNING, keeps_system_messages

from .conftest import Build
from .tiny import make_phi3
from .tiny_tokenizers import (
    CHATML_TEMPLATE,
    PHI3_FIRST_TEMPLATE,
    PHI3_TEMPLATE,
    sentencepiece_tokenizer,
)

REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "keeps"),
    [
        (PHI3_TEMPLATE, True),
        (CHATML_TEMPLATE, True),
        (PHI3_FIRST_TEMPLATE, False),
        (REFUSES, False),
        (None, None),
    ],
    ids=["Phi-3", "ChatML", "the first Phi-3", "one that refuses them", "no template"],
)
def test_template_that_loses_system_messages_is_known(
    template: str | None, keeps: bool | None
) -> None:
    tokenizer: PreTrainedTokenizerFast = sentencepiece_tokenizer()
    tokenizer.chat_template = template
    assert keeps_system_messages(tokenizer) is keeps


@pytest.mark.parametrize(
    ("template", "keeps"), [(PHI3_TEMPLATE, True), (PHI3_FIRST_TEMPLATE, False)]
)
def test_lost_system_messages_are_told_and_noted(
    template: str,
    keeps: bool,
    build_folder: Build,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = make_phi3(tmp_path / "source")
    (source / "chat_template.jinja").write_text(template)
    folder = build_folder(source, "fp32")
    record = json.loads((folder / "quantization.json").read_text())
    assert record["chat_template_system"] is keeps
    assert (SYSTEM_WARNING in capsys.readouterr().out.splitlines()) is not keeps


def test_published_template_writes_the_roles_as_phi3_was_trained() -> None:
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "bye"},
    ]
    text = sentencepiece_tokenizer().apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|system|>\nbe brief<|end|>\n<|user|>\nhello<|end|>\n"
        "<|assistant|>\nhi<|end|>\n<|user|>\nbye<|end|>\n<|assistant|>\n"
    )
