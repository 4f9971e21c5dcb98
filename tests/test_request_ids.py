"""Request ids: the client's own or a new one, the same in header and body."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from app.api import create_app

from .services import StubService, events, running

RIGHT = ["a", "gen-7", "A.b_c~d:e/f+g=h@i-0", "x" * 128]
WRONG = ["", " ", "a b", "a\tb", '"a"', "a,b", "a;b", "<a>", "\u00e9", "x" * 129, "a%0a", "{a}"]
MADE = re.compile(r"[0-9a-f]{32}")


@pytest.fixture(scope="module")
def client() -> Iterator[FlaskClient]:
    with running(StubService()) as service:
        yield create_app(service).test_client()


def ask(client: FlaskClient, id_: str | None, path: str = "/generate", **body: Any) -> Any:
    headers = {} if id_ is None else {"X-Request-Id": id_}
    return client.post(path, json={"prompt": "a", "max_tokens": 2} | body, headers=headers)


@pytest.mark.parametrize("id_", RIGHT)
def test_clients_id_is_the_one_of_header_and_body(client: FlaskClient, id_: str) -> None:
    plain = ask(client, id_)
    streamed = ask(client, id_, stream=True)
    openai = ask(client, id_, "/v1/completions")
    assert {plain.headers["X-Request-Id"], streamed.headers["X-Request-Id"]} == {id_}
    assert plain.get_json()["request_id"] == id_
    assert events(streamed.data)[-1]["request_id"] == id_
    assert (openai.get_json()["request_id"], openai.get_json()["id"]) == (id_, f"cmpl-{id_}")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/nope"])
@pytest.mark.parametrize("id_", WRONG)
def test_id_that_cannot_be_written_as_it_is_gets_a_400_with_a_new_one(
    client: FlaskClient, id_: str, path: str
) -> None:
    response = ask(client, id_, path)
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, "X-Request-Id")
    assert MADE.fullmatch(response.headers["X-Request-Id"])


def test_request_without_an_id_gets_one_of_its_own(client: FlaskClient) -> None:
    ids = [ask(client, None).headers["X-Request-Id"] for _ in range(3)]
    assert all(MADE.fullmatch(id_) for id_ in ids)
    assert len(set(ids)) == 3


@pytest.mark.parametrize("id_", [None, "mine"])
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/generate", {"prompt": ""}, 400),
        ("POST", "/generate", {"prompt": "a", "max_tokens": 10_000, "stream": True}, 400),
        ("POST", "/generate", None, 415),
        ("GET", "/generate", None, 405),
        ("GET", "/nope", None, 404),
        ("GET", "/v1/models/nope", None, 404),
        ("POST", "/tokenize", {"prompt": "a"}, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/health/live", None, 200),
        ("GET", "/metrics", None, 200),
    ],
)
def test_every_answer_has_an_id_also_an_error(
    client: FlaskClient, method: str, path: str, body: Any, status: int, id_: str | None
) -> None:
    headers = {} if id_ is None else {"X-Request-Id": id_}
    response = client.open(path, method=method, json=body, headers=headers)
    assert response.status_code == status
    shown = response.headers["X-Request-Id"]
    assert shown == id_ if id_ else MADE.fullmatch(shown)
