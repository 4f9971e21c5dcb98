"""docs/operating.md against the code: its metrics, its log."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from app.keys import read_pairs

from .collector import Collector
from .services import SETTINGS, StubService, running, until
from .sockets import Client, post, serving_of
from .test_readme import OPERATING, table_rows


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
