"""The one error of the build side: a message for a person, exit status 2, nothing half-written."""

from __future__ import annotations


class QuantizeError(Exception):
    """The model cannot be built; the message says why and what to do."""
