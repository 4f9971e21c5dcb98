"""/metrics as a scraper gets it: two formats, the same names, and no more series whatever comes."""

from __future__ import annotations

import json
import random
import re
import string
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gevent
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.exposition import OPENMETRICS, TEXT, expose
from app.keys import read_pairs

from .programs import needs
from .services import SETTINGS, StubService, running, until
from .sockets import Client, post, serving_of

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
NUM_RANDOM = 1000


@pytest.fixture(scope="module")
def service() -> Iterator[StubService]:
    with running(StubService(replace(SETTINGS, api_keys=read_pairs("ann:secret")))) as service:
        yield service


def scrape(service: StubService, accept: str | None = None) -> tuple[str, str]:
    """Text and content type, over a socket."""
    head = f"Accept: {accept}\r\n" if accept is not None else ""
    with serving_of(service) as server, Client(server) as client:
        reply = client.send(f"GET /metrics HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode()).read()
    assert reply.status == 200
    assert reply.headers["vary"].lower() == "accept"
    return reply.body.decode(), reply.headers["content-type"]


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, TEXT),
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html", TEXT),
        ("text/plain; version=0.0.4", TEXT),
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ("text/plain;q=0.9, application/openmetrics-text; version=1.0.0; q=0.1", TEXT),
        ("application/openmetrics-text; q=0", TEXT),
        ("application/openmetrics-text; version=abc", TEXT),
        ("application/openmetrics-text; version=2.0.0; x=y", TEXT),
        ("text/plain; version=x", TEXT),
        (";;,,=/;q=z", TEXT),
    ],
)
def test_format_is_what_is_asked_for_and_nonsense_gets_text(
    service: StubService, accept: str | None, content_type: str
) -> None:
    text, told = scrape(service, accept)
    assert told == content_type
    assert text.endswith("# EOF\n") == (content_type == OPENMETRICS)


def parsed(service: StubService) -> tuple[dict[str, Metric], dict[str, Metric]]:
    text, _ = expose(service.exposed, [])
    openmetrics, _ = expose(service.exposed, ["application/openmetrics-text"])
    return (
        {family.name: family for family in parse_text(text.decode())},
        {family.name: family for family in parse_openmetrics(openmetrics.decode())},
    )


def series(families: dict[str, Metric]) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Names and labels of all samples."""
    return {
        (sample.name, frozenset(sample.labels.items()))
        for family in families.values()
        for sample in family.samples
    }


def test_both_formats_have_the_same_series(service: StubService) -> None:
    as_text, as_openmetrics = parsed(service)
    assert series(as_text) == series(as_openmetrics)
    names = {name for name, _ in series(as_text)}
    assert {"phi_serve_prompt_tokens_total", "phi_serve_ready", "process_open_fds"} <= names
    assert not any(name.endswith("_created") for name in names)


def test_units_are_those_of_the_names_and_every_family_has_help(service: StubService) -> None:
    _, families = parsed(service)
    ours = {name: each for name, each in families.items() if name.startswith("phi_serve_")}
    units = ("seconds", "bytes", "ratio", "tokens")
    for name, family in ours.items():
        expected = [unit for unit in units if name.endswith(f"_{unit}")]
        assert [family.unit] == (expected or [""]), name
    assert [family.name for family in families.values() if not family.documentation] == []


def test_no_exemplar_is_told(service: StubService) -> None:
    _, families = parsed(service)
    assert all(s.exemplar is None for family in families.values() for s in family.samples)


def lint(text: str) -> str:
    program = needs("promtool")
    ran = subprocess.run(
        [program, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    return ran.stdout + ran.stderr


def test_promtool_finds_nothing_wrong(service: StubService) -> None:
    assert lint(expose(service.exposed, [])[0].decode()) == ""


def test_promtool_finds_what_is_wrong() -> None:
    assert "no help text" in lint("# TYPE wrong counter\nwrong 1\n")


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(1, 20)))


def random_request(rng: random.Random) -> bytes:
    """With a path, a model and a key that nobody has sent before."""
    path = rng.choice(["/", "/v1/", "/v1/models/", "/admin/", "/metrics/"]) + random_text(rng)
    kind = rng.randrange(4)
    key = b"secret" if kind < 3 else random_text(rng).encode()
    authorization = b"Authorization: Bearer " + key
    if kind == 0:
        method = rng.choice(["GET", "PUT", "DELETE", random_text(rng).upper()])
        head = f"{method} {path}?{random_text(rng)} HTTP/1.1\r\nHost: {random_text(rng)}\r\n"
        return head.encode() + authorization + b"\r\n\r\n"
    model = {"model": random_text(rng), "prompt": "a", "max_tokens": 1}
    target = path if kind == 1 else "/v1/completions"
    identity = f"X-Request-Id: {random_text(rng)}".encode()
    return post(json.dumps(model).encode(), authorization, identity, path=target.encode())


def test_a_thousand_random_paths_models_and_keys_make_no_series(service: StubService) -> None:
    rng = random.Random(7)
    before = series(parsed(service)[0])
    statuses = set()
    with gevent.Timeout(250), serving_of(service) as server:
        for _ in range(NUM_RANDOM):
            with Client(server) as client:
                statuses.add(client.send(random_request(rng)).read().status)
    assert statuses >= {401, 404}
    assert series(parsed(service)[0]) == before


def test_prompts_and_answers_make_no_series(service: StubService) -> None:
    before = series(parsed(service)[0])
    body = json.dumps({"prompt": "abc", "max_tokens": 3, "ignore_eos": True}).encode()
    with serving_of(service) as server, Client(server) as client:
        sent = post(body, b"Authorization: Bearer secret", path=b"/generate")
        assert client.send(sent).read().status == 200
    until(service.is_idle)
    assert series(parsed(service)[0]) == before


def test_reasons_in_the_code_are_all_in_the_set() -> None:
    """Of what the app raises by name; another would be counted, but as `other`."""
    from app.metric_families import REASONS

    source = "".join(path.read_text() for path in Path("app").glob("*.py"))
    codes = set(re.findall(r'^    code(?:: ClassVar\[str\])? = "(\w+)"', source, re.M))
    assert len(codes) > 15
    assert codes - {"client_left"} <= set(REASONS)
