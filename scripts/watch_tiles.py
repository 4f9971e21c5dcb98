"""What watch.py shows: numbers of a server's `/metrics`, and of what has changed between two
readings of them. It knows neither network nor terminal.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "phi_serve_"
WINDOW_SECONDS = 10.0  # what rates and percentiles are of
_BARS = "▁▂▃▄▅▆▇█"

Buckets = dict[float, float]  # upper bound -> how many values are not above it


@dataclass
class Reading:
    """One scrape, at an instant of a clock in seconds. Samples of one name are added up."""

    at: float
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, Buckets] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)  # by reason
    model: dict[str, str] = field(default_factory=dict)

    def goes_back(self, before: "Reading") -> bool:
        """Another process answers: what only ever grows has become less."""
        return any(
            value < before.values.get(name, 0.0)
            for name, value in self.values.items()
            if name.endswith(("_total", "_count"))
        )


def parse(text: str, at: float) -> Reading:
    """Raises ValueError if it is no text of Prometheus', or not of this server's."""
    values: dict[str, float] = defaultdict(float)
    buckets: dict[str, Buckets] = defaultdict(lambda: defaultdict(float))
    reading = Reading(at)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            if name.endswith("_bucket"):
                bounds = buckets[name.removesuffix("_bucket")]
                bounds[float(sample.labels["le"])] += sample.value
                continue
            values[name] += sample.value
            if name == "requests_rejected_total":
                reading.errors[sample.labels["reason"]] = sample.value
            elif name == "model_info":
                reading.model = dict(sample.labels)
    if "num_requests_running" not in values:
        raise ValueError(f"no metrics that begin with {PREFIX}")
    reading.values, reading.buckets = dict(values), dict(buckets)
    return reading


def rate(before: Reading, now: Reading, name: str) -> float | None:
    """A second, of a counter."""
    seconds = now.at - before.at
    if name not in now.values or seconds <= 0:
        return None
    return (now.values[name] - before.values.get(name, 0.0)) / seconds


def quantile(before: Reading, now: Reading, name: str, share: float) -> float | None:
    """Of a histogram's values between the two readings, as Prometheus estimates it: evenly spread
    within a bucket. None if there are none."""
    old = before.buckets.get(name, {})
    counts = {le: n - old.get(le, 0.0) for le, n in sorted(now.buckets.get(name, {}).items())}
    if not counts or (total := max(counts.values())) <= 0:
        return None
    rank = share * total
    for (low, below), (high, up_to) in pairwise([(0.0, 0.0), *counts.items()]):
        if up_to >= rank:
            if high == float("inf"):
                return low
            return low + (high - low) * (rank - below) / max(up_to - below, 1e-9)
    return None


Measure = Callable[[Reading, Reading], float | None]
Write = Callable[[float], str]


@dataclass(frozen=True)
class Tile:
    title: str
    measure: Measure
    write: Write
    curve: Measure | None = None  # what its plot is of, if not of the same

    def show(self, value: float | None) -> str:
        return "–" if value is None else self.write(value)


def _gauge(name: str) -> Measure:
    return lambda before, now: now.values.get(name)


def _percentile(name: str, percent: int) -> Measure:
    return lambda before, now: quantile(before, now, name, percent / 100)


def _rate(name: str) -> Measure:
    return lambda before, now: rate(before, now, name)


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


_TTFT, _ITL = "time_to_first_token_seconds", "inter_token_latency_seconds"
_ERRORS = "requests_rejected_total"

TILES = (
    Tile("running", _gauge("num_requests_running"), _whole),
    Tile("waiting", _gauge("num_requests_waiting"), _whole),
    Tile("batch limit", _gauge("batch_limit"), _whole),
    Tile("KV usage", _gauge("kv_cache_usage_ratio"), _percent),
    Tile("saturation", _gauge("saturation_ratio"), _percent),
    Tile("busy ratio", _gauge("engine_busy_ratio"), _percent),
    Tile("tokens/s", _rate("generation_tokens_total"), _whole),
    Tile("TTFT p50", _percentile(_TTFT, 50), _milliseconds),
    Tile("TTFT p95", _percentile(_TTFT, 95), _milliseconds),
    Tile("ITL p50", _percentile(_ITL, 50), _milliseconds),
    Tile("ITL p95", _percentile(_ITL, 95), _milliseconds),
    Tile(
        "errors",
        lambda before, now: now.values.get(_ERRORS, 0.0),  # no sample before the first one
        _whole,
        curve=lambda before, now: rate(before, now, _ERRORS) or 0.0,
    ),
)


class History:
    """Readings of the last `WINDOW_SECONDS`, and each tile's curve of the last minutes."""

    def __init__(self, num_points: int) -> None:
        self._readings: deque[Reading] = deque()
        self.values: list[float | None] = [None] * len(TILES)
        self.curves = [deque[float | None](maxlen=num_points) for _ in TILES]

    @property
    def last(self) -> Reading | None:
        return self._readings[-1] if self._readings else None

    def add(self, reading: Reading) -> None:
        if self.last is not None and reading.goes_back(self.last):
            self._readings.clear()
        self._readings.append(reading)
        while len(self._readings) > 2 and reading.at - self._readings[1].at >= WINDOW_SECONDS:
            self._readings.popleft()
        before = self._readings[0]
        self.values = [tile.measure(before, reading) for tile in TILES]
        for tile, value, curve in zip(TILES, self.values, self.curves, strict=True):
            curve.append(value if tile.curve is None else tile.curve(before, reading))

    def miss(self) -> None:
        """The server has not answered; what answers next may be another process."""
        self._readings.clear()
        self.values = [None] * len(TILES)
        for curve in self.curves:
            curve.append(None)


def sparkline(values: list[float | None]) -> str:
    """A character for each; a blank where there is none."""
    most = max((value for value in values if value is not None), default=0.0)
    top = len(_BARS) - 1
    return "".join(
        " " if value is None else _BARS[round(top * value / most) if most > 0 else 0]
        for value in values
    )
