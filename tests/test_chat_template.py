"""Whether system messages reach the model."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from quantize.chat_template import keeps_system_messages

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
