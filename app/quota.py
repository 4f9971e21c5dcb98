"""How much each API key may ask for, and has: requests and tokens of the last 60 seconds, and the
requests that are open. Pure logic: the clock comes in, and keys are names.

The windows slide: what was used counts for exactly 60 seconds. A request is let in while its key
has a token left; what it takes beyond that counts, too, and holds back the next.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .errors import RateLimited

log = logging.getLogger(__name__)

WINDOW_SECONDS = 60.0
_CONCURRENCY_SECONDS = 1.0  # when an open request ends, nobody knows


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one key; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """Of a window; 0 of it counts once it is forgotten or taken back."""

    at: float
    amount: int


class Window:
    """What was used in the last 60 seconds, and when."""

    def __init__(self) -> None:
        self.used = 0
        self._entries: deque[Entry] = deque()

    def add(self, amount: int, now: float) -> Entry:
        entry = Entry(now, amount)
        if amount:
            self._entries.append(entry)
            self.used += amount
        return entry

    def take_back(self, entry: Entry) -> None:
        """As if it had never been used."""
        self.used -= entry.amount
        entry.amount = 0

    def forget(self, now: float) -> None:
        """What is older than the window."""
        while self._entries and self._entries[0].at + WINDOW_SECONDS <= now:
            self.take_back(self._entries.popleft())

    def seconds_until_below(self, limit: int, now: float) -> float:
        """0 if less than `limit` is used."""
        self.forget(now)
        left = self.used
        if left < limit:
            return 0.0
        for entry in self._entries:
            left -= entry.amount
            if left < limit:
                return entry.at + WINDOW_SECONDS - now
        raise AssertionError("limits are at least 1")


class _Account:
    """What one key has used. Kept by name, so that new limits find what was used before."""

    def __init__(self) -> None:
        self.requests = Window()
        self.tokens = Window()
        self.open: set[Lease] = set()

    def settle(self, now: float) -> None:
        for lease in self.open:
            self.tokens.add(lease.take_new(), now)

    def is_empty(self, now: float) -> bool:
        self.requests.forget(now)
        self.tokens.forget(now)
        return not (self.open or self.requests.used or self.tokens.used)


class Lease:
    """One request of a key, from its admission to its end."""

    def __init__(self, account: _Account, clock: Callable[[], float]) -> None:
        self._account = account
        self._clock = clock
        self._request = account.requests.add(1, clock())
        self._count: Callable[[], int] = lambda: 0
        self._charged = 0

    def meter(self, count: Callable[[], int]) -> None:
        """`count` tells how many tokens the request has taken by now, its prompt's included, which
        are charged at once."""
        self._count = count
        self._account.tokens.add(self.take_new(), self._clock())

    def take_new(self) -> int:
        """Tokens that were not charged yet. A count that fails is not asked again: it costs its own
        request's tokens, and nobody a place."""
        try:
            count = self._count()
        except Exception:
            log.exception("a request's tokens cannot be counted")
            self._count = lambda: self._charged
            return 0
        new, self._charged = count - self._charged, count
        return new

    def cancel(self) -> None:
        """The server has refused it for want of room, or does not serve: the request does not
        count. Its place and its tokens do, if it has any."""
        self._account.requests.take_back(self._request)

    def end(self) -> None:
        """However it ended; a second time is without effect."""
        if self in self._account.open:
            self._account.open.discard(self)
            self._account.tokens.add(self.take_new(), self._clock())


class Quotas:
    """All keys. Belongs to the hub; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, name: str, limits: Limits) -> Lease:
        """A request of the key `name`, which counts from now on until its lease ends.

        Raises RateLimited, with the limit for which the wait is longest; a request that is refused
        does not count.
        """
        now = self._clock()
        account = self._accounts.setdefault(name, _Account())
        account.settle(now)
        if refusals := _refusals(account, limits, now):
            raise max(refusals, key=lambda refusal: refusal.retry_after or 0.0)
        lease = Lease(account, self._clock)
        account.open.add(lease)
        return lease

    def settle(self) -> None:
        """Charges what open requests have generated since the last time; called every second, so
        that a token counts from when it came. Forgets keys that use nothing."""
        now = self._clock()
        for account in self._accounts.values():
            account.settle(now)
        self._accounts = {n: a for n, a in self._accounts.items() if not a.is_empty(now)}


def _refusals(account: _Account, limits: Limits, now: float) -> list[RateLimited]:
    found = []
    for name, limit, window in (
        ("requests_per_minute", limits.requests_per_minute, account.requests),
        ("tokens_per_minute", limits.tokens_per_minute, account.tokens),
    ):
        if limit is not None and (seconds := window.seconds_until_below(limit, now)):
            message = f"{name}: this key's limit of {limit} is used up for"
            found.append(RateLimited(f"{message} {math.ceil(seconds)} s", seconds))
    most = limits.concurrent_requests
    if most is not None and len(account.open) >= most:
        message = f"concurrent_requests: this key's limit of {most} open requests is reached"
        found.append(RateLimited(message, _CONCURRENCY_SECONDS))
    return found
