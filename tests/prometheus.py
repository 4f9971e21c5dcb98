"""A real Prometheus, with the rules of deploy/prometheus, that scrapes one server."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import yaml

from .live import ROOT, wait_for
from .programs import needs
from .test_ops_port import free_port

RULES = ROOT / "deploy" / "prometheus"
INTERVAL = "500ms"


class Prometheus:
    """Its data lies in `folder`. Use as a context manager."""

    def __init__(self, folder: Path, url: str) -> None:
        program, port = needs("prometheus"), free_port()
        config = yaml.safe_load((RULES / "prometheus.yml").read_text())
        config["global"] |= dict.fromkeys(("scrape_interval", "evaluation_interval"), INTERVAL)
        config["global"]["scrape_timeout"] = INTERVAL
        config["scrape_configs"][0]["static_configs"] = [{"targets": [urlsplit(url).netloc]}]
        config["rule_files"] = [str(RULES / file) for file in config["rule_files"]]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "log").open("w+")
        options = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder}"]
        options.append(f"--web.listen-address=127.0.0.1:{port}")
        self._process = subprocess.Popen([program, *options], stderr=self._log, cwd=folder)

    def __enter__(self) -> Prometheus:
        try:
            wait_for(self._is_ready, "Prometheus")
        except AssertionError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            self._log.seek(0)
            raise AssertionError(self._log.read())
        try:
            return requests.get(f"{self.url}/-/ready", timeout=10).status_code == 200
        except requests.ConnectionError:
            return False

    def get(self, path: str, **parameters: Any) -> Any:
        """The `data` of an answer of its API."""
        response = requests.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60)
        answer = response.json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def ask(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series now."""
        found = self.get("query", query=expression)["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def value(self, expression: str) -> float:
        [(_, value)] = self.ask(expression)
        return value

    def samples(self, metric: str, start: float, end: float) -> list[tuple[float, float]]:
        """Instant and value of each scrape from `start` to `end`, seconds since 1970."""
        window = f"{metric}[{round(1000 * (end - start)) + 1}ms]"  # of Prometheus 3 it is open
        [series] = self.get("query", query=window, time=end)["result"]
        return [(at, float(value)) for at, value in series["values"]]

    def wait_for_scrape(self, after: float) -> float:
        """The instant of a scrape that has begun after that one and is stored."""

        def newest() -> float:
            found = self.ask("timestamp(phi_serve_ready) and on (instance) up == 1")
            return found[0][1] if found and found[0][1] > after else 0.0

        return float(wait_for(newest, "a scrape"))


def now() -> float:
    """By the clock that Prometheus stamps with."""
    return time.time()
