"""A request as tracing will see it: what its route knows, left in the WSGI environment.

The edge puts it there if spans are made at all; nothing else happens before the answer has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .answer import Answer

TRACED = "phi_serve.traced"  # in the environ


@dataclass(slots=True)
class Traced:
    """`answer` is there once the engine has the request."""

    model: str | None = None  # as the request names it
    served_model: str | None = None
    is_stream: bool = False
    answer: Answer | None = None
