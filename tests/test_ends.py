"""How an answer ends, as a client sees it, on an engine that says what it is told to: every end
token of a Phi-3 folder, and an answer that goes round in circles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from app.api import create_app
from app.engine import Engine
from app.served import Served
from app.service import Service
from app.text import TextCodec

from .engines import loaded_model, scripted_engine
from .services import SETTINGS, events
from .tiny_tokenizers import phi3_numbered_tokenizer

END, ASSISTANT, ENDOFTEXT = 32007, 32001, 32000
PHI3_ENDS = [ENDOFTEXT, ASSISTANT, END]


@pytest.fixture(scope="module")
def phi3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and configs of a folder that number their tokens as Phi-3's do."""
    folder = tmp_path_factory.mktemp("phi3-tokenizer")
    phi3_numbered_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ENDOFTEXT}))
    generation = {"eos_token_id": [END, ASSISTANT, ENDOFTEXT]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


class ScriptedService(Service):
    """The real service on an engine that says `script`."""

    def __init__(self, codec: TextCodec, script: list[int]) -> None:
        super().__init__(SETTINGS)
        self._codec, self._script = codec, script

    def _load(self, served: Served) -> Engine:
        served.loaded = loaded_model("scripted", self._codec, 4096, 32064)
        return scripted_engine(self._script, self._codec.eos_ids, served.observer)


@pytest.fixture
def ask(phi3_folder: Path) -> Iterator[Any]:
    """Answers to the same request, plain and streamed, when the model says `script`."""
    codec = TextCodec.load(phi3_folder)
    services: list[Service] = []

    def make(script: list[int], **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        service = ScriptedService(codec, script)
        services.append(service)
        service.bridge.start()
        with gevent.Timeout(60):
            while not service.bridge.is_ready:
                gevent.sleep(0.001)
        client = create_app(service).test_client()
        body = {"prompt": "a", **fields}
        plain = client.post("/generate", json=body).get_json()
        streamed = events(client.post("/generate", json=body | {"stream": True}).data)
        plain["counts"] = {
            reason: service.registry.get_sample_value(
                "phi_serve_request_success_total", {"finish_reason": reason}
            )
            for reason in ("stop", "length", "repetition")
        }
        return plain, streamed

    yield make
    for service in services:
        service.bridge.request_stop()
        assert service.bridge.ended.wait(60)


def test_all_ends_of_phi3_are_known(phi3_folder: Path) -> None:
    assert sorted(TextCodec.load(phi3_folder).eos_ids) == PHI3_ENDS


@pytest.mark.parametrize(
    ("generation", "known"),
    [
        (None, [ENDOFTEXT, END]),
        ({"eos_token_id": ENDOFTEXT}, [ENDOFTEXT, END]),
        ({"eos_token_id": ASSISTANT}, PHI3_ENDS),
        ({"eos_token_id": [ASSISTANT]}, PHI3_ENDS),
    ],
)
def test_turn_end_of_phi3_is_known_whatever_the_generation_config_names(
    phi3_folder: Path, generation: Any, known: list[int], tmp_path: Path
) -> None:
    """None: there is no such file."""
    shutil.copytree(phi3_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert sorted(TextCodec.load(tmp_path).eos_ids) == known


@pytest.mark.parametrize("end", PHI3_ENDS)
def test_every_end_of_phi3_stops_the_answer_and_is_no_text(ask: Any, end: int) -> None:
    said = phi3_numbered_tokenizer().encode("the tea", add_special_tokens=False)
    plain, streamed = ask([*said, end, *said])
    assert (plain["text"], plain["finish_reason"]) == (" the tea", "stop")
    assert "".join(event["text"] for event in streamed) == plain["text"]
    assert streamed[-1]["finish_reason"] == "stop"
    assert plain["usage"]["completion_tokens"] == len(said) + 1
    assert plain["counts"]["stop"] == 2


def test_circling_answer_ends_alike_plain_and_streamed_and_is_counted(ask: Any) -> None:
    circle = phi3_numbered_tokenizer().encode("the tea", add_special_tokens=False)
    plain, streamed = ask(circle, repetition_guard=7, max_tokens=600)
    assert (plain["text"], plain["finish_reason"]) == (" the tea" * 7, "repetition")
    assert "".join(event["text"] for event in streamed) == plain["text"]
    assert streamed[-1]["finish_reason"] == "repetition"
    assert streamed[-1]["usage"] == plain["usage"]
    assert plain["counts"] == {"stop": 0, "length": 0, "repetition": 2}


def test_circling_answer_runs_on_by_default(ask: Any) -> None:
    circle = phi3_numbered_tokenizer().encode("the tea", add_special_tokens=False)
    plain, _ = ask(circle, max_tokens=600)
    assert (plain["finish_reason"], plain["usage"]["completion_tokens"]) == ("length", 600)
