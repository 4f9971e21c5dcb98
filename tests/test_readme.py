"""README and docs/operating.md against the code: what they name exists, what they ask works."""

from __future__ import annotations

import json
import re
from typing import Any

import click
import pytest

from app.config import OPTIONS
from app.generate_requests import GenerateRequest
from app.keys import parse_file
from app.protocol import parse
from app.quota import Limits
from quantize.families import FUSED
from quantize.forms import PORTABLE

from .live import ROOT, LiveServer

README = (ROOT / "README.md").read_text()
OPERATING = (ROOT / "docs" / "operating.md").read_text()


def table_rows(heading: str, first: str = "", text: str = README) -> list[list[str]]:
    """The cells of the first table under `heading` whose first column has that title."""
    section = text.split(f"# {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = section[section.index(f"| {first}") :].split("\n\n", 1)[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def asked_bodies() -> list[str]:
    return re.findall(r"curl .*/generate .*-d '(.+)'", README)


def test_settings_table_is_what_the_code_takes() -> None:
    def shown(option: click.Option) -> list[str]:
        cells = [f"`{option.opts[0]}`", f"`{option.envvar}`", f"`{option.default}`"]
        return [*cells, str(option.help)]

    options = [option for option in OPTIONS if isinstance(option, click.Option)]
    rows = table_rows("Settings", text=OPERATING)
    assert rows == [shown(option) for option in options]
    assert [row for row in rows if row in table_rows("Settings")] == table_rows("Settings")
    assert len(table_rows("Settings")) == 10


def test_request_table_names_every_field() -> None:
    named = re.findall(r"`(\w+)`", " ".join(row[0] for row in table_rows("Asking", "field")))
    assert set(named) == set(GenerateRequest.model_fields)


def test_every_file_of_the_tree_exists_and_none_is_missing() -> None:
    tree = README.split("## Files\n", 1)[1]
    for folder, following in (("app", "quantize/"), ("quantize", "scripts/")):
        part = tree.split(f"\n{folder}/", 1)[1].split(f"\n{following}", 1)[0]
        named = set(re.findall(r"\b(\w+\.py)\b", part))
        found = {file.name for file in (ROOT / folder).glob("*.py")}
        assert named == found - {"__init__.py", "__main__.py"}


def test_families_that_are_offered_are_those_of_the_table() -> None:
    rows = table_rows("Models", "family")
    assert [row[0] for row in rows] == list(FUSED.values())


def test_portable_model_types_are_those_that_are_named() -> None:
    sentence = README.split("are made of the model types", 1)[1].split(":", 1)[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == PORTABLE


def test_example_of_a_file_of_keys_is_one() -> None:
    [example] = re.findall(r"```json\n(.*?)```", OPERATING, re.S)
    ann, bob = parse_file(example.encode())
    assert (ann.limits, bob.limits) == (Limits(), Limits(60, 20_000, 4))


def test_examples_are_valid_requests() -> None:
    bodies = asked_bodies()
    assert len(bodies) == 2
    for body in bodies:
        parse(GenerateRequest, body.encode())


@pytest.mark.parametrize(
    "path",
    ["README.md"]
    + [f"docs/{name}.md" for name in ("api", "gpu", "image", "operating", "performance")],
)
def test_links_lead_to_files_and_headings(path: str) -> None:
    file = ROOT / path
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", file.read_text()):
        linked = (file.parent / target) if target else file
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
            assert anchor in [
                re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings
            ]


@pytest.mark.slow
def test_examples_get_the_kind_of_answer_that_is_shown(default_server: LiveServer) -> None:
    """The words may differ from machine to machine: int8 kernels round differently."""
    shown = [json.loads(line) for line in README.splitlines() if line.startswith('{"text"')]
    plain, streamed = (json.loads(body) for body in asked_bodies())
    answer: dict[str, Any] = default_server.generate(**plain)
    assert answer.keys() == shown[0].keys()
    assert answer["usage"] == shown[0]["usage"]
    text = "".join(event["text"] for event in default_server.stream(**streamed))
    assert "Paris" in text
