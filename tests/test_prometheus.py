"""deploy/prometheus by promtool, and against what a server really writes."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from app.metric_families import REASONS
from app.sequence import FinishReason

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
from .programs import needs

FOLDER = ROOT / "deploy" / "prometheus"
CONFIG = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
MONITORING = (ROOT / "docs" / "monitoring.md").read_text()


def rules_of(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


RECORDING, ALERTS = rules_of("recording.yml"), rules_of("alerts.yml")
RECORDED = {rule["record"] for rule in RECORDING}
NAMES = [alert["alert"] for alert in ALERTS]
TESTS = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]


def promtool(*arguments: str) -> str:
    command = [needs("promtool"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configuration_and_its_rules_are_valid() -> None:
    told = promtool("check", "config", "--lint-fatal", "prometheus.yml")
    assert f"{len(RECORDING)} rules found" in told and f"{len(ALERTS)} rules found" in told


def test_rules_do_what_their_tests_say() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


@pytest.mark.parametrize("name", NAMES)
def test_alert_is_tested_with_what_fires_and_with_what_does_not(name: str) -> None:
    tests = [test for test in TESTS if test["name"] == name]
    expected = [each for test in tests for each in test["promql_expr_test"]]
    assert all(f'alertname="{name}"' in each["expr"] for each in expected)
    fired = " ".join(s["labels"] for each in expected for s in each["exp_samples"])
    given = " ".join(each["series"] for test in tests for each in test["input_series"])
    assert f'alertname="{name}",alertstate="firing"' in fired
    assert '="good"' in given and '="good"' not in fired


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_alert_says_how_bad_what_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"] == {"severity": alert["labels"]["severity"]}
    assert alert["labels"]["severity"] in ("critical", "warning")
    summary, description = alert["annotations"]["summary"], alert["annotations"]["description"]
    assert alert["annotations"].keys() == {"summary", "description"}
    assert 20 < len(summary) < 120 < len(description) < 600


def test_alerts_have_names_of_their_own_and_stand_in_the_document() -> None:
    assert len(set(NAMES)) == len(NAMES)
    rows = re.findall(r"^\| `(PhiServe\w+)` \| (\w+) \|", MONITORING, re.M)
    assert rows == [(alert["alert"], alert["labels"]["severity"]) for alert in ALERTS]


def test_every_metric_of_the_rules_is_in_a_live_scrape() -> None:
    scrape = real_scrape()
    named = {name for rule in (*RECORDING, *ALERTS) for name in metrics_of(rule["expr"])}
    assert len(named) > 25
    assert unknown(named, scrape, RECORDED) == set()
    for file in FOLDER.iterdir():
        assert unknown(our_names_in(file.read_text()), scrape) == set(), file.name


def test_every_label_that_rules_ask_for_exists() -> None:
    scrape = served(real_scrape())
    values = {"reason": set(REASONS), "finish_reason": {each.value for each in FinishReason}}
    values |= {"alertname": set(NAMES), "alertstate": {"firing"}}
    scrape |= {"ALERTS": [dict.fromkeys(("alertname", "alertstate"), "")]}  # Prometheus' own
    for rule in (*RECORDING, *ALERTS):
        for metric, label, _, value in selectors_of(rule["expr"]):
            if label == "job":
                assert value == CONFIG["scrape_configs"][0]["job_name"]
                continue
            assert metric in GPU_METRICS or any(label in labels for labels in scrape[metric])
            assert set(value.split("|")) <= values.get(label, {value})


def test_every_recording_rule_is_read_by_an_alert() -> None:
    read = {name for rule in (*RECORDING, *ALERTS) for name in metrics_of(rule["expr"])}
    assert read >= RECORDED
