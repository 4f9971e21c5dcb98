"""deploy/compose.yaml, as far as it can be checked without containers."""

from __future__ import annotations

import re
import shlex
import urllib.request
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml

from app.config import OPTIONS
from app.routes import ROUTES

from .live import ROOT
from .test_prometheus import CONFIG

FILE = ROOT / "deploy" / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DEFAULTS = {str(option.envvar): option.default for option in OPTIONS}
GRAFANA = ROOT / "deploy" / "grafana"


def seconds(text: str) -> int:
    assert text.endswith("s")
    return int(text[:-1])


def test_there_are_the_server_prometheus_and_grafana() -> None:
    assert SERVICES.keys() == {"server", "prometheus", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_pinned_watched_and_bound(name: str) -> None:
    service = SERVICES[name]
    image = r"phi-serve:local" if name == "server" else r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+"
    assert re.fullmatch(image, service["image"])
    check = service["healthcheck"]
    assert check["test"][0] == "CMD"
    assert seconds(check["timeout"]) <= seconds(check["interval"])
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert seconds(service["stop_grace_period"]) >= 30


def test_server_is_given_longer_to_stop_than_its_drain_takes() -> None:
    environment = SERVICES["server"]["environment"]
    assert environment.keys() <= DEFAULTS.keys()
    asked = DEFAULTS | environment
    drain = int(asked["PRE_DRAIN_SECONDS"]) + int(asked["DRAIN_SECONDS"])
    assert seconds(SERVICES["server"]["stop_grace_period"]) >= drain + 5


def test_server_is_built_from_the_repository_and_checked_by_its_own_health() -> None:
    server = SERVICES["server"]
    assert (FILE.parent / server["build"]["context"]).resolve() == ROOT
    assert server["build"]["dockerfile"] == "Dockerfile"
    _, python, flag, code = server["healthcheck"]["test"]
    assert (python, flag) == ("python", "-c")
    compile(code, "healthcheck", "exec")
    url = re.search(r'"(http[^"]+)"', code)
    assert url is not None
    asked = urllib.request.Request(url[1])
    assert asked.selector in {route.path for route in ROUTES}
    port = server["environment"]["PORT"]
    assert asked.host == f"127.0.0.1:{port}"
    assert server["ports"] == [f"{port}:{port}"]


def test_nothing_of_the_host_is_mounted_and_all_files_are_there() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in COMPOSE["volumes"], name
        for mounted in service.get("configs", []):
            file = COMPOSE["configs"][mounted["source"]]["file"]
            assert file.startswith("./") and (FILE.parent / file).is_file()
            assert PurePosixPath(mounted["target"]).is_absolute()
    used = [each["source"] for service in SERVICES.values() for each in service.get("configs", [])]
    assert sorted(used) == sorted(COMPOSE["configs"])


def test_only_the_server_can_be_reached_from_other_machines() -> None:
    for name in ("prometheus", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


def test_parts_find_one_another() -> None:
    [job] = CONFIG["scrape_configs"]
    assert job["static_configs"] == [
        {"targets": [f"server:{SERVICES['server']['environment']['PORT']}"]}
    ]
    assert job["metrics_path"] in {route.path for route in ROUTES}
    mounted = {each["source"]: each["target"] for each in SERVICES["prometheus"]["configs"]}
    folder = PurePosixPath(mounted["prometheus"]).parent
    command = " ".join(map(shlex.quote, SERVICES["prometheus"]["command"]))
    assert f"--config.file={mounted['prometheus']}" in command
    assert {str(folder / file) for file in CONFIG["rule_files"]} <= set(mounted.values())

    provisioning = GRAFANA / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "phi-serve.yml").read_text())[
        "providers"
    ]
    targets = {each["source"]: each["target"] for each in SERVICES["grafana"]["configs"]}
    assert str(PurePosixPath(targets["dashboard"]).parent) == provider["options"]["path"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == targets["dashboard"]
