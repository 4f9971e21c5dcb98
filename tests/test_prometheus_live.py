"""A real Prometheus on a real server under load, against what the load generator itself saw.

What a histogram tells of a p95 is interpolated inside a bucket. So the generator's own times are
put in the same buckets, and interpolated likewise: what is left is what the two have measured. The
server counts from the request's arrival and to the token, the generator from before the send and
to the text, so no time of the generator's is shorter; sockets make the difference of milliseconds.

The machine may stall the generator and not the server, which then measures itself alone. So a load
is repeated until the figures agree, all of one load; what a server reckons wrongly agrees in none.
What must hold in any case, must in each.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import pytest
from dialects import Target
from load_client import Answer, LoadClient, User
from load_report import first_token_seconds
from workload import make_prompts

from .conftest import DEFAULT_FOLDER
from .live import ROOT, LiveServer, wait_for
from .metric_names import our_names_in, unknown
from .prometheus import Prometheus, now

ROWS = 8
SECONDS = 3.0  # of a load: some scrapes
TTFT = "phi_serve_time_to_first_token_seconds"
TOKENS = "phi_serve_generation_tokens_total"
TRIES = 10  # one where nothing stalls
UNSEEN = (0.0, 1.0)  # a figure that no scrape was in time for

within_10_percent = partial(pytest.approx, rel=0.1)


@dataclass
class Load:
    """What the generator saw; instants in seconds since 1970, as Prometheus's."""

    answers: list[Answer]
    before: float  # scrapes without load, around it
    after: float
    clock: float  # what its own instants lack to those

    def rate(self, start: float, end: float) -> float:
        """Tokens/s that came in this window."""
        num_tokens = sum(
            answer.completion_tokens / len(answer.text_at)
            for answer in self.answers
            for at in answer.text_at
            if start < at + self.clock <= end
        )
        return num_tokens / (end - start)

    def num_open(self, at: float) -> int:
        at -= self.clock
        return sum(answer.sent_at <= at < answer.done_at for answer in self.answers)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """The default model, whose steps are long beside what sockets and the generator take."""
    with LiveServer(DEFAULT_FOLDER, "--max-batch-size", str(ROWS)) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(
    server: LiveServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus"), server.url) as prometheus:
        server.wait_ready()  # meanwhile Prometheus finds its target, which takes it five seconds
        yield prometheus


def ask_on(target: Target, rng: random.Random, most: int, until: float, to: list[Answer]) -> User:
    """Requests one after the other, each with up to `most` tokens."""
    while time.perf_counter() < until:
        [prompt] = make_prompts(rng, rng.randint(1, 8), 1)
        to.append((yield target.request([prompt], rng.randint(most // 4, most))))


def run(server: LiveServer, prometheus: Prometheus, num_clients: int, most: int) -> Load:
    # One that is a letter: of others the text may come later than the token.
    letter = server.post("/tokenize", prompt="eee").json()["tokens"][-1]
    target = Target(server.url, extra={"allowed_token_ids": [letter]})
    rng, answers = random.Random(num_clients), list[Answer]()
    before = prometheus.wait_for_scrape(now())
    until = time.perf_counter() + SECONDS
    with LoadClient(server.url) as client:
        users = [ask_on(target, rng, most, until, answers) for _ in range(num_clients)]
        client.run((None, user) for user in users)
    after = prometheus.wait_for_scrape(now())
    assert not [answer.failure for answer in answers if answer.failure]
    return Load(answers, before, after, time.time() - time.perf_counter())


def quantile(part: float, edges: list[float], counts: list[float]) -> float:
    """As histogram_quantile does it; `counts` add up."""
    rank = part * counts[-1]
    at = bisect_left(counts, rank)
    below, start = (counts[at - 1], edges[at - 1]) if at else (0.0, 0.0)
    return start + (edges[at] - start) * (rank - below) / (counts[at] - below)


def in_buckets(values: list[float], edges: list[float]) -> list[float]:
    counts = [0.0] * len(edges)
    for value in values:
        counts[bisect_left(edges, value)] += 1
    return list(accumulate(counts))


def first_token_figures(prometheus: Prometheus, load: Load) -> list[tuple[float, float]]:
    """p95 and mean by Prometheus, each with the generator's own."""

    def grown(name: str) -> str:  # exactly: increase() would extrapolate
        return f"({name} @ {load.after:.3f} - {name} @ {load.before:.3f})"

    buckets = grown(f"{TTFT}_bucket")
    found = sorted((float(labels["le"]), value) for labels, value in prometheus.ask(buckets))
    edges, counts = [edge for edge, _ in found], [count for _, count in found]
    seconds = first_token_seconds(load.answers)
    own = in_buckets(seconds, edges)
    assert counts[-1] == own[-1] == len(load.answers)
    assert all(here >= there for here, there in zip(counts, own, strict=True))
    p95 = prometheus.value(f"histogram_quantile(0.95, {buckets})")
    assert p95 == pytest.approx(quantile(0.95, edges, counts))
    mean = prometheus.value(f"{grown(f'{TTFT}_sum')} / {grown(f'{TTFT}_count')}")
    return [(p95, quantile(0.95, edges, own)), (mean, sum(seconds) / len(seconds))]


def tokens_figures(prometheus: Prometheus, load: Load) -> list[tuple[float, float]]:
    """Tokens/s between the first and the last scrape inside the load."""
    scrapes = prometheus.samples(TOKENS, load.before, load.after)
    own = sum(answer.completion_tokens for answer in load.answers)
    assert scrapes[-1][1] - scrapes[0][1] == own  # nothing is lost, or counted twice
    inside = [(at, value) for at, value in scrapes if load.num_open(at)]
    if len(inside) < 3:
        return [UNSEEN]
    (start, first), (end, last) = inside[0], inside[-1]
    return [((last - first) / (end - start), load.rate(start, end))]


def saturation_figures(prometheus: Prometheus, load: Load) -> list[tuple[float, float]]:
    """Its mean over the scrapes inside the load, and that of the requests open at them."""
    scrapes = prometheus.samples("phi_serve_saturation_ratio", load.before, load.after)
    inside = [(value, load.num_open(at)) for at, value in scrapes if load.num_open(at)]
    own = [min(1.0, num_open / ROWS) for _, num_open in inside]
    if not inside:
        return [UNSEEN]
    return [(sum(value for value, _ in inside) / len(inside), sum(own) / len(own))]


@pytest.mark.parametrize(("num_clients", "most"), [(ROWS // 2, 40), (3 * ROWS, 12)])
def test_prometheus_tells_what_the_load_generator_saw(
    server: LiveServer, prometheus: Prometheus, num_clients: int, most: int
) -> None:
    figures: list[tuple[float, float]] = []
    for _ in range(TRIES):
        load = run(server, prometheus, num_clients, most)
        figures = [
            *tokens_figures(prometheus, load),
            *saturation_figures(prometheus, load),
            *(first_token_figures(prometheus, load) if num_clients > ROWS else []),
        ]
        if all(here == within_10_percent(there) for here, there in figures):
            break
    assert [here for here, _ in figures] == within_10_percent([there for _, there in figures])


def test_prometheus_evaluates_all_rules_on_it(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, str]]:
        groups = prometheus.get("rules")["groups"]
        found = [rule for group in groups for rule in group["rules"]]
        return [] if any(rule["health"] == "unknown" for rule in found) else found

    found = wait_for(rules, "an evaluation")
    assert [rule["name"] for rule in found if rule["health"] != "ok"] == []


def test_prometheus_has_the_server_as_its_only_target(prometheus: Prometheus) -> None:
    def is_up() -> bool:
        [target] = prometheus.get("targets")["activeTargets"]
        return bool(target["health"] == "up")

    wait_for(is_up, "a scrape in time")


def test_every_metric_that_deploy_names_is_there(server: LiveServer) -> None:
    text = server.get("/metrics").text
    files = [file for file in (ROOT / "deploy").rglob("*.*") if file.is_file()]
    named = set().union(*(our_names_in(file.read_text()) for file in files))
    assert len(named) > 30
    assert unknown(named, text, {"phi_serve_load_factor_of_ready"}) == set()  # the adapter's
