"""How log messages are written: each as one line of JSON, or as text. All of them alike."""

from __future__ import annotations

import logging
from typing import Any

from pythonjsonlogger.orjson import OrjsonFormatter


class _Json(OrjsonFormatter):
    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        if not log_data["message"]:  # a message of fields alone
            del log_data["message"]
        return log_data


def set_up(level: str, format_: str) -> None:
    """For the whole process, on standard error."""
    out = logging.StreamHandler()
    if format_ == "json":
        out.setFormatter(
            _Json(
                ["levelname", "name", "message"],
                timestamp="time",
                rename_fields={"levelname": "level", "name": "logger"},
            )
        )
    else:
        out.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[out])
    logging.captureWarnings(True)
