"""What a key may use: windows that slide, tokens charged as they come, places that come back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from app.errors import RateLimited
from app.quota import Lease, Limits, Quotas


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock) -> Quotas:
    return Quotas(clock)


def refusal(quotas: Quotas, limits: Limits, name: str = "a") -> RateLimited:
    with pytest.raises(RateLimited) as raised:
        quotas.admit(name, limits)
    return raised.value


def use(lease: Lease, tokens: int) -> None:
    """A request that takes so many and ends."""
    lease.meter(lambda: tokens)
    lease.end()


def test_requests_beyond_the_limit_wait_until_the_first_is_a_minute_old(
    quotas: Quotas, clock: Clock
) -> None:
    limits = Limits(requests_per_minute=2)
    for _ in range(2):
        quotas.admit("a", limits).end()
        clock.now += 10
    refused = refusal(quotas, limits)
    assert refused.retry_after == 40
    assert refused.headers() == {"Retry-After": "40"}
    assert refused.message == "requests_per_minute: this key's limit of 2 is used up for 40 s"
    clock.now += 39.5
    assert refusal(quotas, limits).headers() == {"Retry-After": "1"}
    clock.now += 0.5
    quotas.admit("a", limits).end()
    assert refusal(quotas, limits).retry_after == 10


def test_no_span_of_a_minute_has_more_requests_than_the_limit(quotas: Quotas, clock: Clock) -> None:
    """Whoever waits as long as it is told to is let in."""
    limits, admitted = Limits(requests_per_minute=5), []
    for _ in range(40):
        try:
            quotas.admit("a", limits).end()
            admitted.append(clock.now)
            clock.now += 7
        except RateLimited as refused:
            clock.now += float(refused.headers()["Retry-After"])
            quotas.admit("a", limits).end()
            admitted.append(clock.now)
    assert all(sum(at - 60 < each <= at for each in admitted) <= 5 for at in admitted)
    assert len(admitted) == 40


def test_refused_request_does_not_count(quotas: Quotas, clock: Clock) -> None:
    limits = Limits(requests_per_minute=1)
    quotas.admit("a", limits).end()
    clock.now += 30
    refusal(quotas, limits)
    clock.now += 30
    quotas.admit("a", limits)


def test_request_that_the_server_had_no_room_for_does_not_count(
    quotas: Quotas, clock: Clock
) -> None:
    limits = Limits(requests_per_minute=2)
    first = quotas.admit("a", limits)
    clock.now += 30
    for _ in range(5):
        lease = quotas.admit("a", limits)
        lease.cancel()
        lease.end()
    clock.now += 30
    first.cancel()  # it is forgotten already, and is not given back twice
    for _ in range(2):
        quotas.admit("a", limits).end()
    refusal(quotas, limits)


def test_count_that_fails_costs_nobody_a_place_or_another_its_charge(quotas: Quotas) -> None:
    limits = Limits(tokens_per_minute=10, concurrent_requests=2)
    counts = [5, 5]
    failing, other = (quotas.admit("a", limits) for _ in range(2))
    failing.meter(lambda: counts[0])
    other.meter(lambda: 3)
    counts.clear()
    quotas.settle()
    other.meter(lambda: 4)
    quotas.settle()
    failing.end()
    quotas.admit("a", limits)  # 9 of 10 tokens, 1 of 2 places
    other.meter(lambda: 5)
    assert "tokens_per_minute" in refusal(quotas, limits).message


def test_keys_do_not_share(quotas: Quotas) -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=1, concurrent_requests=1)
    quotas.admit("a", limits).meter(lambda: 1)
    refusal(quotas, limits)
    quotas.admit("b", limits)


def test_prompt_counts_at_once_and_what_is_generated_as_it_comes(
    quotas: Quotas, clock: Clock
) -> None:
    limits, count = Limits(tokens_per_minute=100), 60
    lease = quotas.admit("a", limits)
    lease.meter(lambda: count)
    quotas.admit("a", limits).end()  # 40 are left
    clock.now += 20
    count = 90
    quotas.settle()
    clock.now += 20
    count = 100
    refused = refusal(quotas, limits)
    assert refused.message == "tokens_per_minute: this key's limit of 100 is used up for 20 s"
    assert refused.retry_after == 20  # then the prompt is a minute old
    clock.now += 20
    quotas.admit("a", limits).end()
    count = 160
    lease.end()
    assert refusal(quotas, limits).retry_after == 20  # 30 of the tokens are 40 seconds old


def test_more_tokens_than_were_left_count_and_hold_back_the_next(
    quotas: Quotas, clock: Clock
) -> None:
    limits = Limits(tokens_per_minute=10)
    use(quotas.admit("a", limits), 9)
    clock.now += 1
    use(quotas.admit("a", limits), 500)
    assert refusal(quotas, limits).retry_after == 60
    clock.now += 59.5
    assert refusal(quotas, limits).retry_after == 0.5
    clock.now += 0.5
    quotas.admit("a", limits)


def test_open_requests_are_bounded_and_an_end_counts_once(quotas: Quotas) -> None:
    limits = Limits(concurrent_requests=2)
    first, _ = (quotas.admit("a", limits) for _ in range(2))
    refused = refusal(quotas, limits)
    assert refused.headers() == {"Retry-After": "1"}
    assert refused.message.startswith("concurrent_requests: this key's limit of 2 ")
    for _ in range(2):
        first.end()
    quotas.admit("a", limits)
    refusal(quotas, limits)


def test_limit_with_the_longest_wait_is_the_one_that_is_told(quotas: Quotas, clock: Clock) -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=5, concurrent_requests=1)
    lease = quotas.admit("a", limits)
    assert "requests_per_minute" in refusal(quotas, limits).message
    clock.now += 10
    lease.meter(lambda: 5)
    assert "tokens_per_minute" in refusal(quotas, limits).message
    clock.now += 60
    assert "concurrent_requests" in refusal(quotas, limits).message


def test_new_limits_find_what_was_used_before(quotas: Quotas, clock: Clock) -> None:
    for _ in range(5):
        use(quotas.admit("a", Limits()), 10)
        clock.now += 1
    quotas.settle()
    assert refusal(quotas, Limits(requests_per_minute=5)).retry_after == 55
    assert refusal(quotas, Limits(requests_per_minute=2)).retry_after == 58
    assert refusal(quotas, Limits(tokens_per_minute=50)).retry_after == 55
    quotas.admit("a", Limits(requests_per_minute=6, tokens_per_minute=51))


def test_names_that_use_nothing_are_forgotten_and_those_with_open_requests_are_not(
    quotas: Quotas, clock: Clock
) -> None:
    quotas.admit("gone", Limits()).end()
    quotas.admit("open", Limits())
    clock.now += 60
    quotas.settle()
    assert set(quotas._accounts) == {"open"}
    refusal(quotas, Limits(concurrent_requests=1), "open")
