"""The numbers of a load, of answers whose times are known."""

from __future__ import annotations

from load_client import Answer
from load_report import percentile, percentiles_ms, summarize, table_row, tokens_per_second


def answer(sent_at: float, *text_at: float, failure: str = "", kind: str = "") -> Answer:
    return Answer(sent_at, text_at[-1], list(text_at), 10, len(text_at), failure, kind)


def test_percentile_is_the_nearest_rank_of_the_sorted_values() -> None:
    values = [30, 10, 50, 20, 40]
    assert [percentile(values, p) for p in (0, 20, 21, 50, 95, 100)] == [10, 10, 20, 30, 50, 50]


def test_percentiles_of_nothing_are_null() -> None:
    assert percentiles_ms([]) is None


def test_throughput_is_the_tokens_of_good_answers_over_first_send_to_last_byte() -> None:
    run = [answer(1.0, 2.0, 3.0), answer(2.0, 4.0, 5.0), answer(2.0, 4.0, failure="gone")]
    assert tokens_per_second(run) == 4 / (5.0 - 1.0)


def test_summary_takes_ttft_from_the_send_and_itl_within_one_request() -> None:
    row = summarize(2, [[answer(0.0, 1.0, 1.5), answer(0.0, 3.0, 3.25)]])
    assert row["ttft_ms"] == {"p50": 1000, "p95": 3000, "p99": 3000}
    assert row["itl_ms"] == {"p50": 250, "p95": 500, "p99": 500}
    assert row["e2e_ms"] == {"p50": 1500, "p95": 3250, "p99": 3250}


def test_summary_of_repeats_gives_the_median_rate() -> None:
    row = summarize(1, [[answer(0.0, 1.0)], [answer(0.0, 0.1)], [answer(0.0, 0.5)]])
    assert row["tokens_per_second_runs"] == [1, 10, 2]
    assert row["tokens_per_second"] == 2


def test_summary_counts_failures_and_leaves_them_out_of_the_numbers() -> None:
    row = summarize(1, [[answer(0.0, 1.0), answer(1.0, 9.0, failure="gone")]])
    assert (row["requests"], row["failed"], row["failures"]) == (2, 1, {"gone": 1})
    assert row["e2e_ms"]["p99"] == 1000


def test_summary_of_nothing_but_failures_has_no_latencies() -> None:
    row = summarize(1, [[answer(0.0, 1.0, failure="gone")]])
    assert (row["tokens_per_second"], row["ttft_ms"], row["e2e_ms"]) == (0, None, None)


def test_latency_of_a_planned_request_counts_from_the_plan_not_from_a_late_send() -> None:
    late = answer(2.0, 3.0)
    late.planned_at = 0.5
    row = summarize(None, [[late]], rate=2.0)
    assert (row["ttft_ms"]["p50"], row["e2e_ms"]["p50"]) == (2500, 2500)
    assert row["sent_late_ms"]["p50"] == 1500
    assert row["tokens_per_second"] == round(1 / 2.5, 2)
    assert table_row(row).startswith("        2/s")


def test_spread_has_the_median_the_least_and_the_most_of_the_repeats() -> None:
    row = summarize(1, [[answer(0.0, 1.0)], [answer(0.0, 0.1)], [answer(0.0, 0.5)]])
    assert row["spread"]["tokens_per_second"] == {"median": 2, "min": 1, "max": 10}
    assert row["spread"]["prompt_tokens_per_second"] == {"median": 20, "min": 10, "max": 100}
    assert row["spread"]["ttft_p50_ms"] == {"median": 500, "min": 100, "max": 1000}
    assert "2.0 (1.0..10.0)" in table_row(row)


def test_errors_are_counted_by_kind_and_429_apart() -> None:
    refused, broken = (
        answer(0.0, 1.0, failure="HTTP 429: busy", kind="http_429"),
        answer(0.0, 1.0, failure="gone", kind="connection"),
    )
    retried = answer(0.0, 1.0)
    refused.num_429, retried.num_429 = 1, 2
    row = summarize(1, [[refused, broken, retried]])
    assert row["errors"] == {"http_429": 1, "connection": 1}
    assert (row["failed"], row["refused_429"]) == (2, 3)
    assert "429 3 refusals" in table_row(row)


def test_prompts_that_miss_their_length_are_counted() -> None:
    right, wrong, unasked = answer(0.0, 1.0), answer(0.0, 1.0), answer(0.0, 1.0)
    right.wanted_prompt_tokens, wrong.wanted_prompt_tokens = 10, 11
    assert summarize(1, [[right, wrong, unasked]])["prompts_off_length"] == 1


def test_turns_have_their_own_latencies() -> None:
    first, second = answer(0.0, 1.0), answer(1.0, 1.25)
    second.turn = 2
    row = summarize(1, [[first, second]])
    assert [turn["ttft_ms"]["p50"] for turn in row["turns"]] == [1000, 250]
    assert "turn 2: prompt 10.0, TTFT 250.0/250.0/250.0" in table_row(row)
