"""How log messages are written: each as one line of JSON, or as text. All of them alike, also what
gevent would print."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from pythonjsonlogger.orjson import OrjsonFormatter

log = logging.getLogger(__name__)


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


def tell_hub_errors(hub: Any) -> None:
    """What ends a greenlet or a callback of gevent's `hub`, and nobody waits for, is logged as an
    error."""

    def tell(
        context: object,
        type_: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        # Not its arguments: they may be what a user has written.
        where = getattr(context, "name", None) or type(context).__name__
        log.error("%s has failed", where, exc_info=(type_, error, trace))

    hub.print_exception = tell
