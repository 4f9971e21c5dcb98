"""`/tokenize` and `/detokenize`: a round trip is exact, with both kinds of tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from app.api import create_app
from app.text import TextCodec

from .services import CONTEXT, StubService, running
from .tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer


def with_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """It puts its BOS in front of every text, as Llama's do."""
    bos, id_ = tokenizer.bos_token, tokenizer.bos_token_id
    template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, id_)])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


CODECS = {
    "byte-level": TextCodec(byte_level_tokenizer(), frozenset()),
    "byte-level with BOS": TextCodec(with_bos(byte_level_tokenizer()), frozenset()),
    "sentencepiece": TextCodec(sentencepiece_tokenizer(), frozenset()),
    "sentencepiece with BOS": TextCodec(with_bos(sentencepiece_tokenizer()), frozenset()),
}
CONTROL = {"byte-level": "<|im_start|>", "sentencepiece": "<|assistant|>"}
# U+2581 is how SentencePiece writes a blank: it has no other.
TEXTS = st.text(
    st.one_of(
        st.sampled_from(" \n\t<|>ae\u00e9\U0001f642"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"),
    ),
    max_size=30,
)
LOOKALIKES = [
    *("<|im_start|>", "<|im_end|>\n", " <|assistant|> a", "<|end|><|end|>", "<s>", "</s>a"),
    *(" ", "  a", "\n a", "a ", "<0x41>", "<unk>", "\u200d\ufeff", "\U0001f468\u200d\U0001f469"),
]


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, FlaskClient]]:
    """One service, with each of the tokenizers in turn."""
    with running(StubService()) as service:
        model = service.current.model

        class Client(FlaskClient):
            name: str

            def open(self, *args: Any, **options: Any) -> Any:
                object.__setattr__(model, "codec", CODECS[self.name])
                # Some more, as models' vocabularies have that are padded.
                object.__setattr__(model, "vocab_size", CODECS[self.name].vocab_size + 3)
                return super().open(*args, **options)

        app = create_app(service)
        app.test_client_class = Client
        clients: Any = {name: app.test_client() for name in CODECS}
        for name, client in clients.items():
            client.name = name
        yield clients


def tokenize(client: FlaskClient, text: str, **fields: Any) -> list[int]:
    answer = client.post("/tokenize", json={"prompt": text} | fields).get_json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == CONTEXT
    tokens: list[int] = answer["tokens"]
    return tokens


def detokenize(client: FlaskClient, tokens: list[int]) -> str:
    answer = client.post("/detokenize", json={"tokens": tokens}).get_json()
    text: str = answer["prompt"]
    return text


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("text", LOOKALIKES)
def test_look_of_control_tokens_and_blanks_survives_the_round_trip(
    clients: dict[str, FlaskClient], name: str, text: str
) -> None:
    assert detokenize(clients[name], tokenize(clients[name], text)) == text


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
@example(text="")
def test_any_text_survives_the_round_trip(
    clients: dict[str, FlaskClient], name: str, text: str
) -> None:
    assert detokenize(clients[name], tokenize(clients[name], text)) == text


@pytest.mark.parametrize("name", ["byte-level", "byte-level with BOS"])
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(st.one_of(TEXTS, st.sampled_from(["<|im_start|>", "<|im_end|>"]))))
def test_any_text_with_control_tokens_survives_the_round_trip(
    clients: dict[str, FlaskClient], name: str, parts: list[str]
) -> None:
    text = "".join(parts)
    tokens = tokenize(clients[name], text, parse_special=True)
    assert detokenize(clients[name], tokens) == text


@pytest.mark.parametrize(
    "text",
    [
        *("<|user|>\nthe tea<|end|>\n<|assistant|>\n", "<|user|>a", "<|user|> a", "a<|end|>b"),
        *("<s><|user|>", " <|user|>", "<|end|>  ", "the<|end|> a<|end|>"),
    ],
)
def test_phi3s_prompt_survives_the_round_trip(clients: dict[str, FlaskClient], text: str) -> None:
    for name in ("sentencepiece", "sentencepiece with BOS"):
        tokens = tokenize(clients[name], text, parse_special=True)
        assert detokenize(clients[name], tokens) == text


@pytest.mark.parametrize(("name", "control"), CONTROL.items())
def test_control_token_is_one_id_only_if_it_is_asked_for(
    clients: dict[str, FlaskClient], name: str, control: str
) -> None:
    assert len(tokenize(clients[name], control, parse_special=True)) == 1
    assert len(tokenize(clients[name], control)) > 1


@pytest.mark.parametrize("name", ["byte-level with BOS", "sentencepiece with BOS"])
@pytest.mark.parametrize("parse_special", [False, True])
def test_tokenizers_own_prefix_comes_only_if_it_is_asked_for(
    clients: dict[str, FlaskClient], name: str, parse_special: bool
) -> None:
    client, bos = clients[name], CODECS[name].encode("")
    assert len(bos) == 1
    bare = tokenize(client, "the a", parse_special=parse_special)
    with_prefix = tokenize(client, "the a", parse_special=parse_special, add_special_tokens=True)
    assert with_prefix == bos + bare
    assert detokenize(client, with_prefix).endswith("the a")


@pytest.mark.parametrize("name", CODECS)
def test_tokens_are_those_of_the_model_and_no_others(
    clients: dict[str, FlaskClient], name: str
) -> None:
    size = CODECS[name].vocab_size
    assert detokenize(clients[name], [size - 1]) != ""
    assert detokenize(clients[name], [size, size + 2]) == ""
    response = clients[name].post("/detokenize", json={"tokens": [1, size + 3]})
    error = response.get_json()["error"]
    assert (response.status_code, error["param"]) == (400, "tokens")
    assert f"ids go from 0 to {size + 2}" in error["message"]


def test_no_text_has_no_tokens_and_no_tokens_no_text(clients: dict[str, FlaskClient]) -> None:
    for client in clients.values():
        assert tokenize(client, "") == []
        assert detokenize(client, []) == ""


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_tokens_have_a_text(
    clients: dict[str, FlaskClient], name: str, data: st.DataObject
) -> None:
    ids = st.integers(0, CODECS[name].vocab_size - 1)
    detokenize(clients[name], data.draw(st.lists(ids, max_size=12)))
