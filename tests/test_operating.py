"""docs/operating.md against the code: its example of a deployment, its metrics, its log."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from app.config import OPTIONS
from app.keys import parse_file, read_pairs
from app.routes import ROUTES

from .collector import Collector
from .services import SETTINGS, StubService, running, until
from .sockets import Client, post, serving_of
from .test_readme import OPERATING, table_rows

DEFAULTS = {str(option.envvar): option.default for option in OPTIONS}


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    """Of the Kubernetes example, by kind."""
    [text] = re.findall(r"```yaml\n(.*?)```", OPERATING, re.S)
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def pod(parts: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = parts["Deployment"]["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def env(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in pod["containers"][0]["env"]}


def test_example_sets_settings_that_there_are(env: dict[str, str]) -> None:
    assert env.keys() <= DEFAULTS.keys()
    assert int(env["OPS_PORT"]) != int(env["PORT"])


def test_grace_period_of_the_example_is_longer_than_the_drain(
    pod: dict[str, Any], env: dict[str, str]
) -> None:
    seconds = int(env["PRE_DRAIN_SECONDS"]) + int(env["DRAIN_SECONDS"]) + 5
    assert pod["terminationGracePeriodSeconds"] == seconds
    assert int(env["PRE_DRAIN_SECONDS"]) >= 5


def test_probes_of_the_example_ask_health_on_its_port_with_patience(
    pod: dict[str, Any], env: dict[str, str]
) -> None:
    [container] = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (ports["http"], ports["ops"]) == (int(env["PORT"]), int(env["OPS_PORT"]))
    paths = {route.path for route in ROUTES}
    for kind in ("livenessProbe", "readinessProbe"):
        probe = container[kind]
        assert probe["httpGet"]["path"] in paths
        assert probe["httpGet"]["port"] == "ops"
        assert 2 <= probe["timeoutSeconds"] <= probe["periodSeconds"]
        assert probe["failureThreshold"] >= 2
    assert container["livenessProbe"]["failureThreshold"] >= 6


def test_keys_of_the_example_are_mounted_where_they_are_read(
    parts: dict[str, Any], pod: dict[str, Any], env: dict[str, str]
) -> None:
    [key] = parse_file(parts["Secret"]["stringData"]["keys.json"].encode())
    assert key.name == "ann"
    folders = {each["name"]: each for each in pod["containers"][0]["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert folders.keys() == volumes.keys()
    assert env["API_KEYS_FILE"] == f"{folders['keys']['mountPath']}/keys.json"
    assert volumes["keys"]["secret"]["secretName"] == parts["Secret"]["metadata"]["name"]
    assert "subPath" not in folders["keys"]


def test_table_of_metrics_is_what_there_is() -> None:
    names = {
        metric.name.removeprefix("phi_serve_") + ("_total" if metric.type == "counter" else "")
        for metric in StubService().registry.collect()
    }
    rows = [row[0] for row in table_rows("Metrics", "name", OPERATING)]
    of_process = [row[0] for row in table_rows("Metrics", "name |", OPERATING)]
    told = re.findall(r"`(\w+)`", " ".join([*rows, *of_process]))
    assert sorted(told) == sorted(names)


def test_table_of_the_access_log_has_every_field(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "app.access")
    asked = b'{"prompt": "abc", "max_tokens": 5, "stream": true, "ignore_eos": true}'
    keys = read_pairs("ann:secret")
    with (
        Collector() as collector,
        running(
            StubService(replace(SETTINGS, api_keys=keys, otlp_traces_endpoint=collector.url))
        ) as service,
        serving_of(service) as server,
    ):
        for key in (b"Authorization: Bearer secret", b"Authorization: Bearer wrong"):
            with Client(server) as client:
                client.send(post(asked, key, b"Connection: close", path=b"/generate")).read_to_end()
        until(lambda: len(caplog.records) == 2)
        assert service.tracing is not None
        service.tracing.close()
    fields = {name for record in caplog.records for name in json.loads(json.dumps(record.msg))}
    rows = table_rows("The log", text=OPERATING)
    assert set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows))) == fields
