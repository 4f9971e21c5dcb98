"""vLLM's names, made of ours as they are read; and docs/metrics.md against a scrape of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.exposition import expose
from app.metric_aliases import VLLM

from .live import ROOT
from .services import SETTINGS, StubService, running, until
from .sockets import Client, post, serving_of
from .test_exposition import lint
from .test_readme import table_rows

METRICS = (ROOT / "docs" / "metrics.md").read_text()
LABELS = {"model_name": "stub", "engine": "0"}


@pytest.fixture(scope="module")
def service() -> Iterator[StubService]:
    """It has answered once."""
    with running(StubService(replace(SETTINGS, metrics_aliases="vllm"))) as service:
        body = json.dumps({"prompt": "abc", "max_tokens": 5, "ignore_eos": True}).encode()
        with serving_of(service) as server, Client(server) as client:
            assert client.send(post(body, path=b"/generate")).read().status == 200
        until(service.is_idle)
        yield service


def families_of(service: StubService) -> dict[str, Metric]:
    text = expose(service.exposed, [])[0].decode()
    return {family.name: family for family in parse_text(text)}


def samples_of(family: Metric) -> list[tuple[str, float]]:
    """What is behind the name, and the value."""
    return [(sample.name.removeprefix(family.name), sample.value) for sample in family.samples]


@pytest.mark.parametrize(("alias", "name"), VLLM.items())
def test_alias_says_what_ours_says(service: StubService, alias: str, name: str) -> None:
    families = families_of(service)
    theirs, ours = families[f"vllm:{alias}"], families[f"phi_serve_{name}"]
    assert theirs.type == ours.type
    assert samples_of(theirs) == samples_of(ours)
    assert ours.samples
    for sample in theirs.samples:
        assert sample.labels.items() >= LABELS.items()


def test_aliases_count_what_has_happened(service: StubService) -> None:
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families_of(service).values()
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return samples[f"vllm:{name}", frozenset((LABELS | labels).items())]

    assert value("generation_tokens_total") == 5
    assert value("time_to_first_token_seconds_count") == 1
    assert value("inter_token_latency_seconds_count") == 4
    assert value("request_success_total", finished_reason="length") == 1
    assert value("num_requests_waiting") == value("kv_cache_usage_perc") == 0


def test_openmetrics_has_them_too(service: StubService) -> None:
    text = expose(service.exposed, ["application/openmetrics-text"])[0].decode()
    names = {family.name for family in parse_openmetrics(text)}
    assert names >= {f"vllm:{alias}" for alias in VLLM}


def test_promtool_minds_nothing_but_vllms_colon(service: StubService) -> None:
    lines = lint(expose(service.exposed, [])[0].decode()).splitlines()
    assert [line for line in lines if "should not contain ':'" not in line] == []


def test_without_the_setting_there_is_none_of_them() -> None:
    assert not any(":" in name for name in families_of(StubService()))


def test_label_is_what_answers_call_the_model() -> None:
    """From the start if it is set; without that only the load can tell."""
    named = StubService(
        replace(SETTINGS, metrics_aliases="vllm", served_model_name=("first", "second"))
    )
    [sample] = families_of(named)["vllm:num_requests_waiting"].samples
    assert sample.labels["model_name"] == "first"
    unnamed = StubService(replace(SETTINGS, metrics_aliases="vllm"))
    assert not any(":" in name for name in families_of(unnamed))


# --- docs/metrics.md ------------------------------------------------------------------------------


def test_table_of_aliases_is_what_a_scrape_has(service: StubService) -> None:
    families = families_of(service)
    shown = {
        (family.name + ("_total" if family.type == "counter" else ""))
        for family in families.values()
        if family.name.startswith("vllm:")
    }
    rows = table_rows("vLLM's names", text=METRICS)
    told = [row[0].strip("`") for row in rows]
    assert sorted(told) == sorted(shown)
    for theirs, ours, *_ in rows:
        name = theirs.strip("`").removeprefix("vllm:").removesuffix("_total")
        assert ours.strip("`").removesuffix("_total") == VLLM[name]


def test_names_beside_tritons_are_in_a_scrape(service: StubService) -> None:
    samples = {s.name for family in families_of(service).values() for s in family.samples}
    absent = {"phi_serve_gpu_utilization_ratio", "phi_serve_gpu_memory_used_bytes"}
    rows = table_rows("Triton's names", text=METRICS)
    assert len(rows) > 8
    for theirs, ours in rows:
        assert re.match(r"`nv_\w+`", theirs)
        for name in re.findall(r"`(\w+)(?:\{.*?\})?`", ours):
            full = name if name.startswith("process_") else f"phi_serve_{name}"
            assert full in samples | absent, name
