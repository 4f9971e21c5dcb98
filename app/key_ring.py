"""The keys that count now: those of API_KEYS, and those of a file that is read again as it changes.

Belongs to the hub, which reads the file: a small one, on a disk of this machine.
"""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

from .keys import BadKeys, Key, check_apart, digest_of, parse_file, read_file

log = logging.getLogger(__name__)


class KeyRing:
    """Invariant: once there were keys, a request needs one. A file that cannot be read changes
    nothing, and is told once."""

    def __init__(self, given: tuple[Key, ...], path: Path | None, admin_api_key: str = "") -> None:
        self.is_needed = bool(given) or path is not None
        self._given = given
        self._keys = given
        self._path = path
        self._admin_api_key = admin_api_key  # no key of the file may have its secret
        self._content: bytes | None = None
        self._problem: str | None = None
        self.refresh()

    def find(self, secret: str) -> Key | None:
        """The key with that secret. It takes as long for all secrets that are not known, however
        much of one they have."""
        digest, found = digest_of(secret), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def refresh(self) -> None:
        """Takes over the file if it has changed."""
        if self._path is None:
            return
        try:
            content = read_file(self._path)
            if content != self._content:
                keys = [*self._given, *parse_file(content)]
                self._keys = check_apart(keys, self._admin_api_key)
                self._content = content
                log.info("API_KEYS_FILE: %d keys count now", len(self._keys))
            elif self._problem is not None:
                log.info("API_KEYS_FILE: it is again what was read last")
            self._problem = None
        except BadKeys as error:
            if (problem := str(error)) != self._problem:
                log.error(
                    "API_KEYS_FILE: %s: %s; the %d keys that were known still count",
                    *(self._path, problem, len(self._keys)),
                )
                self._problem = problem
