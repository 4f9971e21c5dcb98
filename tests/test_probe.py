"""The probe on a real tiny graph: passes where nothing has changed, and else never gets ready."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.bridge import State
from app.errors import UnservableModel
from app.kv_cache import KVCache
from app.model import OnnxModel
from app.probe import check_probe
from app.record import Probe

from .conftest import TinyModel
from .edits import copy_of, weight_of
from .engines import loaded_service
from .folders import make_probe
from .tiny import VOCAB

TOKENS = [5, 80, 17, 260, 33, 9, 101]
SCALED = "model.layers.0.mlp.down_proj.MatMul.weight"


@dataclass
class Loaded:
    model: OnnxModel
    probe: dict[str, Any]

    def check(self, **changes: Any) -> None:
        probe = Probe(**self.probe | changes)
        cache = KVCache(self.model.spec.kv, 1, len(probe.token_ids) + 1, self.model.device)
        check_probe(probe, self.model, self.model.spec.vocab_size, cache)


@pytest.fixture(scope="module")
def loaded(tiny: TinyModel) -> Loaded:
    model = OnnxModel.load(tiny.folder, "cpu", num_threads=1)
    return Loaded(model, make_probe(tiny.folder, TOKENS))


def test_graph_that_computes_as_where_it_was_built_passes(loaded: Loaded) -> None:
    loaded.check()


def test_probe_of_one_token_passes(tiny: TinyModel, loaded: Loaded) -> None:
    Loaded(loaded.model, make_probe(tiny.folder, [7], num_top=1)).check()


@pytest.mark.parametrize("place", [0, 4, 7])
def test_one_logit_that_is_off_is_enough_and_is_named(loaded: Loaded, place: int) -> None:
    logits = list(loaded.probe["top_logits"])
    logits[place] += 0.5
    with pytest.raises(UnservableModel, match="computes other numbers") as raised:
        loaded.check(top_logits=logits)
    message = str(raised.value)
    assert f"token {loaded.probe['top_ids'][place]} " in message
    assert f"instead of {logits[place]:.4g}" in message


def test_difference_that_the_probe_allows_passes(loaded: Loaded) -> None:
    logits = [logit + 0.5 for logit in loaded.probe["top_logits"]]
    loaded.check(top_logits=logits, max_difference=0.51)
    with pytest.raises(UnservableModel):
        loaded.check(top_logits=logits, max_difference=0.49)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logit_that_is_not_finite_is_refused(
    loaded: Loaded, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, loaded.probe["top_ids"][2]] = value
    monkeypatch.setattr(loaded.model, "forward", lambda plan, cache: logits)
    with pytest.raises(UnservableModel, match=f"{value:.4g} instead of"):
        loaded.check(max_difference=1e30)


@pytest.mark.parametrize("field", ["token_ids", "top_ids"])
def test_token_that_the_graph_lacks_is_named(loaded: Loaded, field: str) -> None:
    ids = [*loaded.probe[field][:-1], VOCAB]
    with pytest.raises(UnservableModel, match=f"token {VOCAB}, and the graph has {VOCAB}"):
        loaded.check(**{field: ids})


def test_refusal_names_the_cpus_features_and_what_to_do(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.probe.cpu_features", lambda: ["avx2"])
    with pytest.raises(UnservableModel, match="CPU features here: avx2") as raised:
        loaded.check(top_logits=[0.0] * 8)
    assert "--reduce-range" in str(raised.value)


def test_folder_whose_weights_have_changed_never_gets_ready(
    tiny: TinyModel, tmp_path: Path
) -> None:
    folder = copy_of(tiny.folder, tmp_path, probe=make_probe(tiny.folder, TOKENS))
    weight_of(folder, SCALED)[:] *= 3
    service = loaded_service(folder)
    assert service.bridge.state is State.FAILED
    assert isinstance(service.bridge.failure, UnservableModel)
    assert "computes other numbers" in str(service.bridge.failure)


def test_probe_longer_than_a_row_is_read_all_the_same(
    tiny_llama: TinyModel, tmp_path: Path
) -> None:
    probe = make_probe(tiny_llama.folder, TOKENS)
    folder = copy_of(tiny_llama.folder, tmp_path, probe=probe)
    service = loaded_service(folder, "--max-model-len", "4", "--prefill-chunk", "2")
    assert service.bridge.failure is None
    assert service.current.loaded is not None
    assert service.current.loaded.info["probe"] == "passed"


def test_folder_without_a_probe_is_served(tiny_llama: TinyModel, tmp_path: Path) -> None:
    folder = copy_of(tiny_llama.folder, tmp_path, probe=None)
    service = loaded_service(folder)
    assert service.bridge.failure is None
    assert service.current.loaded is not None
    assert service.current.loaded.info["probe"] == "none"
