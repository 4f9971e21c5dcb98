"""The access log: one line for each request, written when its answer has ended.

The socket side knows method, status, bytes and time; what a route knows it leaves in the WSGI
environment under `NOTE`.
"""

from __future__ import annotations

import logging
from typing import Any

NOTE = "phi_serve.note"  # a dict: request_id, error, tokens, finish reason, timings
_MAX_PATH = 512

log = logging.getLogger(__name__)


class Line(dict[str, Any]):
    """A message of fields: the JSON format takes them as they are, the text format as words, one
    named `message` without its name."""

    def __str__(self) -> str:
        told = {name: value for name, value in self.items() if value is not None}
        return " ".join(
            str(value) if name == "message" else f"{name}={value}" for name, value in told.items()
        )


def tell(
    *,
    request_id: str,
    method: str | None,
    path: str | None,
    status: int,
    num_bytes: int,
    seconds: float,
    client: str | None,
    note: dict[str, Any],
) -> None:
    """`path` is as it was sent, which is visible ASCII only; what could not be read is None."""
    log.info(
        Line(
            {
                "request_id": request_id,
                "method": method,
                "path": path[:_MAX_PATH] if path is not None else None,
                "status": status,
                "bytes": num_bytes,
                "seconds": round(seconds, 6),
                "client": client,
            }
            | note
        )
    )
