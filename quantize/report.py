"""What a check found: one line each, good or bad, for a person and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    about: str  # the part that was looked at: weights, graph, tokenizer …
    text: str
    file: str | None = None  # relative to the folder, where one file is at fault


@dataclass(slots=True)
class Report:
    """Findings in the order in which they were made."""

    findings: list[Finding] = field(default_factory=list)

    def ok(self, about: str, text: str) -> None:
        self._add("ok", about, text, None)

    def warning(self, about: str, text: str, file: str | None = None) -> None:
        self._add("warning", about, text, file)

    def error(self, about: str, text: str, file: str | None = None) -> None:
        self._add("error", about, text, file)

    def blames(self, file: str) -> bool:
        """Whether an error about `file` has been told already."""
        return any(f.level == "error" and f.file == file for f in self.findings)

    def count(self, level: Level) -> int:
        return Counter(finding.level for finding in self.findings)[level]

    def lines(self) -> list[str]:
        return [f"{f.level:8} {f.about:10} {f.text}" for f in self.findings]

    def summary(self) -> str:
        return f"{self.count('error')} errors, {self.count('warning')} warnings"

    def to_json(self) -> dict[str, Any]:
        return {
            "errors": self.count("error"),
            "warnings": self.count("warning"),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def _add(self, level: Level, about: str, text: str, file: str | None) -> None:
        # Libraries raise messages of many lines; here a finding is one.
        self.findings.append(Finding(level, about, " ".join(text.strip().splitlines()), file))
