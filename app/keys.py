"""API keys as the settings give them: a name, a secret's digest and limits for each.

Secrets are turned into digests where they are read, and are in no message. What is wrong is told by
its place: the entry's number, and the field.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .quota import Limits

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1000  # each is compared with each request's
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECRET = re.compile(r"[\x21-\x7e]{1,512}")  # what a header can carry as it is
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


class BadKeys(Exception):
    """Keys that cannot be taken; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Key:
    """`name` is for logs and shares; `digest` is the SHA-256 of the secret."""

    name: str
    digest: bytes = field(repr=False)
    limits: Limits = Limits()


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def read_pairs(text: str) -> tuple[Key, ...]:
    """Of `name:secret,name:secret`. Raises BadKeys."""
    if not text:
        return ()
    return check_apart([_pair(pair.strip(), i) for i, pair in enumerate(text.split(","), 1)])


def _pair(text: str, number: int) -> Key:
    name, colon, secret = text.partition(":")
    if not colon:  # it may be a secret: nothing of it is told
        raise BadKeys(f"entry {number} has no colon; each must be name:secret, behind a comma")
    try:
        _name(name)
    except ValueError as error:
        raise BadKeys(f"entry {number}: {error}") from None
    try:
        return Key(name, _digest(secret))
    except ValueError as error:
        raise BadKeys(f"the secret of {name} (entry {number}): {error}") from None


def read_file(path: Path) -> bytes:
    """Its bytes. Raises BadKeys."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would keep its reader waiting
            raise BadKeys("not a file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadKeys(f"cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise BadKeys(f"larger than {MAX_FILE_BYTES} bytes")
    return content


def parse_file(content: bytes) -> tuple[Key, ...]:
    """Raises BadKeys."""
    try:
        parsed = json.loads(content, object_pairs_hook=_object)
        entries = _File.model_validate(parsed).keys_
    except ValidationError as error:  # a ValueError, too, but its text would show the input
        raise BadKeys(_told(error)) from None
    except (ValueError, RecursionError) as error:
        raise BadKeys(f"not JSON: {error}") from None
    return check_apart([entry.key() for entry in entries])


def check_apart(keys: list[Key], admin_api_key: str = "") -> tuple[Key, ...]:
    """Raises BadKeys if two have one name or one secret, or one has the admin's."""
    admin_digest = digest_of(admin_api_key) if admin_api_key else None
    names: dict[bytes, str] = {}
    for key in keys:
        if key.name in names.values():
            raise BadKeys(f"two keys have the name {key.name}")
        if (other := names.setdefault(key.digest, key.name)) != key.name:
            raise BadKeys(f"{other} and {key.name} have the same secret")
        if key.digest == admin_digest:
            raise BadKeys(f"{key.name} has the same secret as ADMIN_API_KEY")
    return tuple(keys)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("a name must be 1 to 64 letters, digits and . _ -")
    return text


def _digest(secret: str) -> bytes:
    if found := _DIGEST.fullmatch(secret):
        return bytes.fromhex(found[1])
    if secret.startswith("sha256:"):
        raise ValueError("sha256: is followed by 64 hexadecimal digits")
    if not _SECRET.fullmatch(secret):
        raise ValueError("a secret must be 1 to 512 visible ASCII characters")
    return digest_of(secret)


def _secret(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("a secret must be a string")
    return _digest(value)


def _told(error: ValidationError) -> str:
    """The first of its errors. Of a field that is not known only the place: it may be a secret."""
    first = error.errors(include_url=False, include_input=False)[0]
    place, message = list(first["loc"]), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = _Entry.model_fields if len(place) > 1 else {"keys": None}
        place, message = place[:-1], f"a field is none of {', '.join(known)}"
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return f"{where.lstrip('.') or 'the file'}: {message}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an object has a field twice")
    return dict(pairs)


_Limit = Annotated[int, Field(ge=1, le=1_000_000_000)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class _Entry(_Strict):
    name: Annotated[str, AfterValidator(_name)]
    secret: Annotated[bytes, BeforeValidator(_secret)] = Field(repr=False)
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrent_requests: _Limit | None = None

    def key(self) -> Key:
        limits = Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)
        return Key(self.name, self.secret, limits)


class _File(_Strict):
    keys_: list[_Entry] = Field(alias="keys", min_length=1, max_length=MAX_KEYS)
