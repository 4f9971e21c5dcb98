"""Calls as each format writes them."""

from __future__ import annotations

from typing import Any

import pytest

from app.tools import HERMES, LLAMA, MISTRAL, PHI4

CALLS = [{"function": {"name": name, "arguments": {"a": "\u00e9"}}} for name in ("x", "y")]


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        (
            HERMES,
            '<tool_call>\n{"name": "x", "arguments": {"a": "\u00e9"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "y", "arguments": {"a": "\u00e9"}}\n</tool_call>',
        ),
        (
            PHI4,
            '<|tool_call|>[{"name": "x", "arguments": {"a": "\u00e9"}}, '
            '{"name": "y", "arguments": {"a": "\u00e9"}}]<|/tool_call|>',
        ),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "x", "arguments": {"a": "\u00e9"}}, '
            '{"name": "y", "arguments": {"a": "\u00e9"}}]',
        ),
        (
            LLAMA,
            '{"name": "x", "parameters": {"a": "\u00e9"}}\n'
            '{"name": "y", "parameters": {"a": "\u00e9"}}',
        ),
    ],
)
def test_calls_are_written_as_the_model_writes_them(format_: Any, text: str) -> None:
    assert format_.text(CALLS) == text
