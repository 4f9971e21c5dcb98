"""What the observer counts, fed with sequences whose stamps are set by hand."""

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from app.errors import InvalidRequest, ModelFailure, NotReady, PromptTooLong, ServeError
from app.metrics import Metrics
from app.sequence import FinishReason, PrefillChunk, SamplingParams, Sequence, StepPlan


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry)


def sequence(
    arrived_at: float = 100.0,
    admitted_at: float | None = None,
    last_token_at: float | None = None,
    finish_reason: FinishReason | None = None,
) -> Sequence:
    made = Sequence("id", [1, 2, 3], SamplingParams(max_tokens=9), arrived_at=arrived_at)
    made.admitted_at = admitted_at
    made.last_token_at = last_token_at
    made.finish_reason = finish_reason
    return made


def prefill(num_tokens: int) -> PrefillChunk:
    return PrefillChunk(sequence(), row=0, start=0, token_ids=[7] * num_tokens)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"phi_serve_{name}", labels)


def count_and_sum(registry: CollectorRegistry, name: str) -> tuple[float | None, float | None]:
    return value(registry, f"{name}_count"), value(registry, f"{name}_sum")


def test_first_token_counts_from_arrival(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.advanced([sequence(arrived_at=100.0, admitted_at=100.25)], now=101.5)
    metrics.advanced([sequence(arrived_at=100.0, admitted_at=100.25)], now=100.75)
    assert count_and_sum(registry, "time_to_first_token_seconds") == (2, 2.25)


def test_first_token_counts_the_time_in_the_queue(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    metrics.advanced([sequence(arrived_at=100.0, admitted_at=100.25)], now=101.5)
    assert count_and_sum(registry, "request_queue_time_seconds") == (1, 0.25)


def test_first_token_is_no_gap_between_tokens(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    metrics.advanced([sequence(admitted_at=100.25)], now=101.5)
    assert count_and_sum(registry, "inter_token_latency_seconds") == (0, 0)


def test_later_token_counts_the_gap_to_the_one_before(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    metrics.advanced([sequence(admitted_at=100.25, last_token_at=101.5)], now=101.625)
    metrics.advanced([sequence(admitted_at=100.25, last_token_at=101.625)], now=102.125)
    assert count_and_sum(registry, "inter_token_latency_seconds") == (2, 0.625)


@pytest.mark.parametrize("name", ["time_to_first_token_seconds", "request_queue_time_seconds"])
def test_later_token_counts_no_second_beginning(
    name: str, registry: CollectorRegistry, metrics: Metrics
) -> None:
    metrics.advanced([sequence(admitted_at=100.25, last_token_at=101.5)], now=101.625)
    assert count_and_sum(registry, name) == (0, 0)


def test_every_token_is_counted(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.advanced([sequence(admitted_at=100.25)], now=101.5)
    metrics.advanced([sequence(admitted_at=100.25, last_token_at=101.5)], now=101.625)
    metrics.advanced([sequence(admitted_at=100.25, last_token_at=101.625)], now=102.125)
    assert value(registry, "generation_tokens_total") == 3


def test_end_counts_from_arrival_to_the_last_token(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    metrics.finished(sequence(last_token_at=103.5, finish_reason=FinishReason.STOP))
    metrics.finished(sequence(last_token_at=101.0, finish_reason=FinishReason.LENGTH))
    assert count_and_sum(registry, "e2e_request_latency_seconds") == (2, 4.5)


def test_end_without_a_token_has_no_latency(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.finished(sequence(finish_reason=FinishReason.ABORT))
    assert count_and_sum(registry, "e2e_request_latency_seconds") == (0, 0)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_end_is_counted_under_its_reason_only(
    reason: FinishReason, registry: CollectorRegistry, metrics: Metrics
) -> None:
    metrics.finished(sequence(finish_reason=reason))
    counts = {
        other: value(registry, "request_success_total", finish_reason=str(other))
        for other in FinishReason
    }
    assert {other for other, count in counts.items() if count} == {reason}
    assert counts[reason] == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidRequest("wrong"), "invalid_value"),
        (PromptTooLong(10, 5), "context_length_exceeded"),
        (NotReady("loading"), "not_ready"),
        (ModelFailure("failed"), "model_failure"),
    ],
)
def test_rejection_is_counted_under_the_errors_code(
    error: ServeError, reason: str, registry: CollectorRegistry, metrics: Metrics
) -> None:
    metrics.rejected(error.code)
    metrics.rejected(error.code)
    assert value(registry, "requests_rejected_total", reason=reason) == 2


def test_code_that_no_error_has_counts_as_another(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    """A label that anybody could make longer would not be bounded."""
    metrics.rejected("made-up")
    assert value(registry, "requests_rejected_total", reason="made-up") is None
    assert value(registry, "requests_rejected_total", reason="other") == 1


def test_labels_are_there_before_anything_has_happened(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    """So that a rate has the first one."""
    for reason in ("not_found", "overloaded", "model_failure", "method_not_allowed", "other"):
        assert value(registry, "requests_rejected_total", reason=reason) == 0
    assert value(registry, "requests_rejected_total", reason="client_left") is None
    for finish_reason in FinishReason:
        assert value(registry, "request_success_total", finish_reason=finish_reason) == 0


@pytest.mark.parametrize(
    ("num_decode", "num_prefill", "size"), [(3, None, 3), (3, 5, 4), (0, 5, 1)]
)
def test_batch_size_counts_decoding_rows_and_the_prefill(
    num_decode: int,
    num_prefill: int | None,
    size: int,
    registry: CollectorRegistry,
    metrics: Metrics,
) -> None:
    chunk = None if num_prefill is None else prefill(num_prefill)
    metrics.stepped(StepPlan([], chunk, [sequence()] * num_decode))
    assert count_and_sum(registry, "batch_size") == (1, size)


def test_prompt_tokens_are_those_of_the_chunks_read(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    for chunk in (prefill(5), None, prefill(3)):
        metrics.stepped(StepPlan([], chunk, [sequence()]))
    assert value(registry, "prompt_tokens_total") == 8


def test_gauges_show_the_last_count(registry: CollectorRegistry, metrics: Metrics) -> None:
    engine = metrics.of_engine()
    engine.counted(num_waiting=7, num_running=2)
    engine.counted(num_waiting=0, num_running=3)
    shown = value(registry, "num_requests_waiting"), value(registry, "num_requests_running")
    assert shown == (0, 3)


def test_engines_add_up_until_one_is_forgotten(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    """Two, while the server switches models; the limit is that of the one requests go to."""
    old, new = metrics.of_engine(), metrics.of_engine()
    old.limited(4)
    new.limited(8)
    old.counted(num_waiting=7, num_running=2)
    new.counted(num_waiting=1, num_running=3)
    names = ("num_requests_waiting", "num_requests_running", "batch_limit")
    assert [value(registry, name) for name in names] == [8, 5, 4]
    metrics.current = new
    metrics.forget(old)
    assert [value(registry, name) for name in names] == [1, 3, 8]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(registry: CollectorRegistry, clock: Clock) -> Metrics:
    return Metrics(registry, slow_step_seconds=0.05, clock=clock)


def test_busy_ratio_is_the_models_share_of_the_time_with_work(
    registry: CollectorRegistry, timed: Metrics, clock: Clock
) -> None:
    engine = timed.of_engine()
    for _ in range(100):
        clock.now += 0.25
        engine.timed(model_seconds=0.125, step_seconds=0.1875, work_seconds=0.25)
    assert value(registry, "engine_busy_ratio") == 0.5


def test_busy_ratio_forgets_what_was_longer_ago_than_its_window(
    registry: CollectorRegistry, timed: Metrics, clock: Clock
) -> None:
    engine = timed.of_engine()
    engine.timed(model_seconds=0.0, step_seconds=0.5, work_seconds=0.5)
    clock.now += 2
    engine.timed(model_seconds=0.5, step_seconds=0.5, work_seconds=0.5)
    assert value(registry, "engine_busy_ratio") == 0.5
    clock.now += 9
    assert value(registry, "engine_busy_ratio") == 1.0
    clock.now += 9
    assert value(registry, "engine_busy_ratio") == 0.0


def test_busy_ratio_is_of_ten_whole_seconds_and_the_present_one(
    registry: CollectorRegistry, timed: Metrics, clock: Clock
) -> None:
    engine = timed.of_engine()
    engine.timed(model_seconds=0.0, step_seconds=1.0, work_seconds=1.0)
    for _ in range(10):
        clock.now += 1
        engine.timed(model_seconds=1.0, step_seconds=1.0, work_seconds=1.0)
    assert value(registry, "engine_busy_ratio") == pytest.approx(10 / 11)
    clock.now += 1
    assert value(registry, "engine_busy_ratio") == 1.0


def test_busy_ratio_of_two_engines_is_that_of_their_times_together(
    registry: CollectorRegistry, timed: Metrics
) -> None:
    timed.of_engine().timed(model_seconds=0.25, step_seconds=0.25, work_seconds=0.25)
    timed.of_engine().timed(model_seconds=0.0, step_seconds=0.25, work_seconds=0.25)
    assert value(registry, "engine_busy_ratio") == 0.5


def test_steps_beyond_the_threshold_are_slow(registry: CollectorRegistry, timed: Metrics) -> None:
    engine = timed.of_engine()
    for seconds in (0.01, 0.05, 0.0501, 3.0):
        engine.timed(seconds, seconds, seconds)
    assert value(registry, "slow_steps_total") == 2


def test_slow_step_has_a_line_with_what_ran_in_it_and_no_more_than_one_in_ten_seconds(
    timed: Metrics, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "app.slow_steps")
    engine = timed.of_engine()

    def step(num_prompt_tokens: int, seconds: float) -> None:
        engine.stepped(StepPlan([], prefill(num_prompt_tokens), [sequence()] * 3))
        engine.timed(seconds, seconds, seconds)

    for seconds in (0.05, 0.2, 0.3, 0.01, 0.4):
        step(5, seconds)
        clock.now += 1
    clock.now += 6
    step(7, 0.06)
    assert [dict(record.msg) for record in caplog.records] == [  # type: ignore[call-overload]
        {"message": "slow step", "seconds": 0.2, "rows": 4, "prefill_tokens": 5, "others": 0},
        {"message": "slow step", "seconds": 0.06, "rows": 4, "prefill_tokens": 7, "others": 2},
    ]


def test_every_step_is_in_the_histogram(registry: CollectorRegistry, timed: Metrics) -> None:
    engine = timed.of_engine()
    for seconds in (0.25, 0.5):
        engine.timed(model_seconds=0.125, step_seconds=seconds, work_seconds=1.0)
    assert count_and_sum(registry, "step_duration_seconds") == (2, 0.75)


def test_rows_without_finite_logits_add_up(registry: CollectorRegistry, metrics: Metrics) -> None:
    assert value(registry, "non_finite_logits_total") == 0
    metrics.spoiled(1)
    metrics.spoiled(2)
    assert value(registry, "non_finite_logits_total") == 3


@pytest.mark.parametrize("seconds", [0.001, 0.05, 1.0, 60.0])
@pytest.mark.parametrize(
    "name",
    [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_queue_time_seconds",
        "e2e_request_latency_seconds",
    ],
)
def test_buckets_reach_beyond_a_minute(
    name: str, seconds: float, registry: CollectorRegistry, metrics: Metrics
) -> None:
    (family,) = [f for f in registry.collect() if f.name == f"phi_serve_{name}"]
    edges = {float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")}
    assert any(seconds <= edge < float("inf") for edge in edges)


def test_every_metric_has_a_help_text(registry: CollectorRegistry, metrics: Metrics) -> None:
    assert [family.name for family in registry.collect() if not family.documentation.strip()] == []


def test_every_name_begins_with_the_services(registry: CollectorRegistry, metrics: Metrics) -> None:
    names = [family.name for family in registry.collect()]
    assert names
    assert [name for name in names if not name.startswith("phi_serve_")] == []


def test_no_metric_is_created_twice(registry: CollectorRegistry, metrics: Metrics) -> None:
    counts = Counter(family.name for family in registry.collect())
    assert [name for name, count in counts.items() if count > 1] == []


def test_second_server_in_the_process_counts_apart(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    Metrics(CollectorRegistry()).of_engine().counted(num_waiting=4, num_running=4)
    assert value(registry, "num_requests_waiting") == 0


def test_exposition_has_no_created_series(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.finished(sequence(last_token_at=101.0, finish_reason=FinishReason.STOP))
    assert b"_created" not in generate_latest(registry)
