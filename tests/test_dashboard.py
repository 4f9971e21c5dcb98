"""deploy/grafana: what the dashboard asks Prometheus for is PromQL, and there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from .live import ROOT
from .metric_names import (
    GPU_METRICS,
    metrics_of,
    our_names_in,
    real_scrape,
    selectors_of,
    served,
    unknown,
)
from .test_prometheus import RECORDED, promtool

FOLDER = ROOT / "deploy" / "grafana"
FILE = FOLDER / "dashboards" / "phi-serve.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
TARGET_LABELS = {"job", "instance"}


def expressions() -> list[str]:
    asked = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return [*asked, *(each["expr"] for each in DASHBOARD["annotations"]["list"])]


def filled_in(expression: str) -> str:
    """As Grafana sends it."""
    for name, value in (("__rate_interval", "1m"), ("job", ".*"), ("instance", ".*")):
        expression = re.sub(rf"\${name}\b", value, expression)
    assert "$" not in expression
    return expression


def test_every_expression_is_parsed_by_prometheus(tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboard:{at}", "expr": filled_in(expression)}
        for at, expression in enumerate(expressions())
    ]
    file = tmp_path / "dashboard.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))


def test_every_metric_of_the_dashboard_is_in_a_live_scrape() -> None:
    scrape = real_scrape()
    asked = {name for expression in expressions() for name in metrics_of(filled_in(expression))}
    assert asked >= GPU_METRICS
    assert unknown(asked, scrape, RECORDED) == set()
    for file in FOLDER.rglob("*.*"):
        if file.is_file():
            assert unknown(our_names_in(file.read_text()), scrape) == set(), file.name


def test_every_label_that_it_asks_for_or_shows_exists() -> None:
    scrape = served(real_scrape())
    for panel in PANELS:
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            chosen = {label for _, label, _, _ in selectors_of(target["expr"])}
            own = {
                label
                for metric in metrics_of(filled_in(target["expr"]))
                for labels in scrape.get(metric, [])
                for label in labels
            }
            assert shown | chosen <= own | TARGET_LABELS | {"alertname", "alertstate"}


@pytest.mark.parametrize(
    "metric",
    [
        "request_success_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "num_requests_waiting",
        "batch_size_sum",
        "batch_limit",
        "kv_cache_usage_ratio",
        "prefix_cache_hit_tokens_total",
        "gpu_utilization_ratio",
        "engine_busy_ratio",
        "saturation_ratio",
        "requests_rejected_total",
    ],
)
def test_dashboard_shows(metric: str) -> None:
    asked = [name for expression in expressions() for name in metrics_of(filled_in(expression))]
    assert f"phi_serve_{metric}" in asked


def test_gpu_is_shown_against_its_aim() -> None:
    panels = [p for p in PANELS if "phi_serve_gpu_utilization_ratio" in p["targets"][0]["expr"]]
    for panel in panels:
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert 0.95 in [step["value"] for step in steps]
    assert len(panels) == 2


def test_panels_have_ids_words_and_a_place_of_their_own() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken
        taken |= cells
    assert all(panel["title"] and panel["description"] for panel in PANELS)


def test_datasource_and_variables_are_those_that_are_provisioned() -> None:
    file = FOLDER / "provisioning" / "datasources" / "prometheus.yml"
    [source] = yaml.safe_load(file.read_text())["datasources"]
    assert VARIABLES["datasource"]["current"]["value"] == source["uid"]
    assert VARIABLES["datasource"]["query"] == source["type"]
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    assert all(panel["datasource"] == wanted for panel in PANELS)
    for name in ("job", "instance"):
        assert re.fullmatch(r"label_values\(phi_serve_ready.*\)", VARIABLES[name]["definition"])


def test_all_is_all_of_ours_not_whatever_prometheus_scrapes() -> None:
    """`up` and `process_...` are of every target, which a value of its own for All would match."""
    for name in ("job", "instance"):
        assert VARIABLES[name]["includeAll"]
        assert "allValue" not in VARIABLES[name]
