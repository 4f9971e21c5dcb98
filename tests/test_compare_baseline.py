"""The tutorial's table, from the answers of its servers."""

from __future__ import annotations

from pathlib import Path

from compare_baseline import FP32, PLAIN, Measured, table, write_page
from load_client import Answer


def answers(num: int, seconds: float, tokens: int, failure: str = "") -> list[Answer]:
    """One behind the other."""
    return [
        Answer(
            n * seconds,
            (n + 1) * seconds,
            completion_tokens=tokens,
            prompt_tokens=8,
            failure=failure,
        )
        for n in range(num)
    ]


def test_rows_have_first_tokens_rates_and_ratios_of_the_same_turn() -> None:
    plain, ours = Measured(PLAIN), Measured(FP32, memory_bytes=2_000_000)
    for theirs, own in ((1.0, 0.5), (2.0, 0.25), (1.0, 0.25)):
        plain.hear(1, answers(2, theirs, 10))
        ours.hear(1, answers(2, own, 10))
    plain.hear_first_tokens(answers(3, 0.2, 1))
    ours.hear_first_tokens([*answers(3, 0.1, 1), *answers(1, 9, 1, "gone")])
    row = ours.report(plain)
    assert (row["first_token_ms"], row["failed"]) == (100, 1)
    assert row["tokens_per_second"]["1"] == {"median": 40, "min": 20, "max": 40}
    assert row["ratio_to_plain"]["1"] == {"median": 4, "min": 2, "max": 8}
    [_, _, first, second] = table([plain.report(plain), row], [1])
    assert first == f"| {PLAIN} | 200 | 10 (5 to 10) | 0 |"
    assert second == f"| {FP32} | 100 | 40 (20 to 40), 4.0 times | 2 |"


def test_page_says_where_and_how(tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.md"
    write_page(page, ["| a |"], {"prompt_tokens": 64, "output_tokens": 16, "repeats": 3})
    text = page.read_text()
    assert "Prompts of 64 tokens" in text and "each server: 3." in text
    assert text.endswith("\n| a |\n")
