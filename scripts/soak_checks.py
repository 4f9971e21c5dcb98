"""What soak.py holds against a load: the engine's counters, the access log, the process. Pure."""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_requests import GONE, Result

EXTRA_FILES = 2  # that a library may have opened
EXTRA_THREADS = 10  # of pools, which start them when they are needed


@dataclass
class Tally:
    """What came of the requests. Failures by kind, with the first of each."""

    results: list[Result] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    num_failures: int = 0

    def failed(self, kind: str, example: str = "") -> None:
        self.num_failures += 1
        self.failures.setdefault(kind, example)

    def add(self, result: Result) -> None:
        self.results.append(result)
        if result.error:
            kind = f"{result.request.path}: {re.sub(r'[0-9]+', 'N', result.error)[:80]}"
            self.failed(kind, f"{result.error} {result.request.sent[:600]!r}")


def slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Of the line through (x, y) with the least squares, and its standard error (Draper & Smith,
    "Applied Regression Analysis", 1.4); NaN for fewer than three points."""
    if len(points) < 3:
        return math.nan, math.nan
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    found = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - found * (x - mean_x)) ** 2 for x, y in points)
    return found, math.sqrt(rest / (len(points) - 2) / spread)


def check_counters(tally: Tally, before: dict[str, float], after: dict[str, float]) -> None:
    """Each choice is ended once; each error is counted once. What clients that left had is
    unknown: it may be either."""

    def grown(name: str) -> dict[str, float]:
        pattern = re.compile(name + r'\{\w+="(\w+)"\}')
        return {
            found[1]: value - before.get(key, 0)
            for key, value in after.items()
            if (found := pattern.fullmatch(key)) and value > before.get(key, 0)
        }

    for name in ("num_requests_running", "num_requests_waiting"):
        if after[name]:
            tally.failed(f"{name} is {after[name]:.0f} at the end")
    answered = [r for r in tally.results if r.reasons]
    known = sum(len(result.reasons) for result in answered)
    others = sum(r.request.num_choices for r in tally.results if not r.reasons)
    ended = sum(grown("request_success_total").values())
    if not known <= ended <= known + others:
        tally.failed("choices ended", f"{ended:.0f}, not {known} to {known + others}")
    seen = Counter(result.code for result in tally.results if result.code)
    num_gone = sum(result.status == GONE for result in tally.results)
    for code, count in grown("requests_rejected_total").items():
        if not seen[code] <= count <= seen[code] + num_gone:
            tally.failed(f"errors counted as {code}", f"{count:.0f}, seen {seen[code]}")
        seen.pop(code)
    if lost := {code: count for code, count in seen.items() if count}:
        tally.failed("errors that were not counted", str(lost))


def check_log(tally: Tally, log: Path) -> None:
    """The access log has each request once, with the status that its client saw."""
    lines: dict[str, list[int]] = {}
    for text in log.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            tally.failed("a line of the log that is not JSON", text[:300])
            continue
        if line.get("logger") == "app.access":
            lines.setdefault(line["request_id"], []).append(line["status"])
        elif line["level"] in ("ERROR", "CRITICAL"):
            tally.failed("an error in the log", text[:600])
    for result in tally.results:
        found = lines.get(result.request.id, [])
        is_ours = result.request.path != "bad"  # else it may have been refused before its id
        if is_ours and len(found) != 1:
            tally.failed(f"{len(found)} lines of a request in the log", result.request.id)
        elif is_ours and result.status != GONE and found != [result.status]:
            tally.failed("another status in the log", f"{found}, seen {result.status}")


def check_process(
    tally: Tally, start: dict[str, float], end: dict[str, float], grows: dict[str, Any], most: float
) -> None:
    for name, extra in (("files", EXTRA_FILES), ("threads", EXTRA_THREADS)):
        if end and end[name] > start[name] + extra:
            tally.failed(f"{name} grew", f"{start[name]} -> {end[name]}")
    if grows["per_minute"] - 2 * grows["standard_error"] > most:  # never of NaN
        tally.failed("memory grows", f"{grows['per_minute']} MiB a minute")
