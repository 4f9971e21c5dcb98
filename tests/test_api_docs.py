"""docs/api.md against the code: it names what is there, and its examples run as they stand."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from app.errors import ServeError
from app.openai_requests import PLATFORM_FIELDS
from app.responses import ChatReason
from app.routes import ROUTES, Route

from .live import ROOT, LiveServer

TEXT = (ROOT / "docs" / "api.md").read_text()
ADDRESS = "localhost:8080"
Example = tuple[str, str]  # a command, and the answer that is shown


def sections() -> dict[str, str]:
    """By heading."""
    parts = re.split(r"^## (.+)\n", TEXT, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def examples(text: str) -> Iterator[Example]:
    """A command goes on while its quotes are open or its line ends with a backslash."""
    for block in blocks(text, "console"):
        assert block.startswith("$ ")
        lines = block[2:].splitlines()
        end = next(
            i + 1
            for i in range(len(lines))
            if "\n".join(lines[: i + 1]).count("'") % 2 == 0 and not lines[i].endswith("\\")
        )
        yield "\n".join(lines[:end]), "\n".join(lines[end:])


CURLS = list(examples(TEXT))
PROGRAMS = blocks(TEXT, "python")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_route_has_a_section_with_a_curl_and_a_python_example(route: Route) -> None:
    section = sections()[f"{route.method} {route.path}"]
    path = route.path.replace("{name}", "SmolLM2-135M-Instruct")
    commands = [command for command, _ in examples(section)]
    assert any(re.search(rf"{ADDRESS}{path}(\s|$)", command) for command in commands)
    assert blocks(section, "python")


def test_sections_are_the_routes_and_what_they_share() -> None:
    routes = {f"{route.method} {route.path}" for route in ROUTES}
    assert set(sections()) == routes | {"What all routes share"}


def test_every_field_is_in_the_section_of_its_route_or_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text().split("\n## Asking\n")[1].split("\n## ")[0]
    for route in ROUTES:
        if route.request is not None:
            told = sections()[f"{route.method} {route.path}"] + readme
            told += sections()["What all routes share"]
            fields = set(route.request.model_fields)
            assert fields <= set(re.findall(r"`\"?(\w+)", told)), route.path


def test_table_of_errors_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", TEXT, re.M)
    classes = [ServeError, *subclasses(ServeError)]
    known = {(str(kind.status), kind.code) for kind in classes}
    assert set(rows) == known | {("404", "not_found"), ("405", "method_not_allowed")}
    assert len(rows) == len(set(rows))


def subclasses(kind: type[ServeError]) -> Iterator[type[ServeError]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_table_of_finish_reasons_is_that_of_the_schema() -> None:
    section = TEXT.split("### How an answer ends\n")[1].split("\n### ")[0]
    assert set(re.findall(r"^\| `(\w+)` \| ", section, re.M)[1:]) == set(get_args(ChatReason))


def test_ignored_fields_are_listed() -> None:
    listed = TEXT.split("take and ignore them:")[1].split("\n\n")[0]
    assert re.findall(r"`([a-z_]+)`", listed)[:-1] == list(PLATFORM_FIELDS)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    key = "key-of-the-examples"
    with (
        pytest.MonkeyPatch.context() as patch,
        LiveServer(ROOT / "models" / "default", ADMIN_API_KEY=key) as server,
    ):
        patch.setenv("ADMIN_API_KEY", key)
        yield server.wait_ready()


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), CURLS)
def test_curl_gets_the_kind_of_answer_that_is_shown(
    command: str, shown: str, server: LiveServer
) -> None:
    command = command.replace(ADDRESS, server.url.removeprefix("http://"))
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    answers, expected = jsons(run.stdout), jsons(shown)
    if not expected:
        assert run.stdout.startswith(shown.split("…")[0].strip())
    assert len(answers) == len(expected)
    for answer, kind in zip(answers, expected, strict=True):
        assert_is_like(answer, kind)


def jsons(text: str) -> list[Any]:
    """The JSON of an answer, or of each event of a stream."""
    if text.startswith("data: "):
        return [json.loads(event[6:]) for event in text.split("\n\n") if event.strip()]
    return [json.loads(text)] if text.startswith("{") else []


def assert_is_like(answer: Any, shown: Any) -> None:
    """All that is shown is there, of the same type; a finish reason, a count of tokens and a code
    are equal. The words may differ: int8 kernels round differently from machine to machine."""
    if isinstance(shown, dict):
        for key, value in shown.items():
            if key == "…":
                continue
            assert key in answer
            if key in ("finish_reason", "prompt_tokens", "code", "object", "role", "param"):
                assert answer[key] == value, key
            assert_is_like(answer[key], value)
    elif isinstance(shown, list):
        for value, each in zip(answer, shown, strict="…" not in shown):
            if each != "…":
                assert_is_like(value, each)
    elif isinstance(shown, str) and "…" not in shown:
        assert isinstance(answer, str)
    elif not isinstance(shown, str):
        assert (answer is None) == (shown is None)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_python_example_runs_and_prints_what_its_comments_say(
    program: str, server: LiveServer
) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = program.replace(f"http://{ADDRESS}", server.url)
        names: dict[str, Any] = {}
        exec(compile(code, "docs/api.md", "exec", dont_inherit=True), names)
    if "client" in names:
        names["client"].close()
    for said in re.findall(r"print\(.*  # (.+)$", program, re.M):
        assert all(part in printed.getvalue() for part in said.split("…"))
    assert printed.getvalue().strip()
