"""API keys out of a variable and a file; which count after the file has changed, or broken."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app import key_ring
from app.key_ring import KeyRing
from app.keys import (
    MAX_FILE_BYTES,
    MAX_KEYS,
    BadKeys,
    Key,
    check_apart,
    digest_of,
    parse_file,
    read_file,
    read_pairs,
)
from app.quota import Limits

SECRET = "sk-do-not-tell"
DIGEST = "sha256:" + hashlib.sha256(SECRET.encode()).hexdigest()


def written(path: Path, *keys: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": keys}))
    return path


@pytest.mark.parametrize("secret", [SECRET, DIGEST, DIGEST[:7] + DIGEST[7:].upper()])
def test_secret_may_be_written_as_its_digest(secret: str) -> None:
    [in_variable] = read_pairs(f"ann:{secret}")
    [in_file] = parse_file(json.dumps({"keys": [{"name": "ann", "secret": secret}]}).encode())
    assert in_variable == in_file == Key("ann", digest_of(SECRET))


def test_variable_holds_several_keys_and_secrets_may_have_colons() -> None:
    assert read_pairs(" ann:a:b , bob.2:c=") == (
        Key("ann", digest_of("a:b")),
        Key("bob.2", digest_of("c=")),
    )
    assert read_pairs("") == ()


def test_file_has_limits(tmp_path: Path) -> None:
    numbers = {"requests_per_minute": 60, "tokens_per_minute": 9000, "concurrent_requests": 4}
    entry = {"name": "ann", "secret": SECRET, **numbers}
    assert [key.limits for key in parse_file(json.dumps({"keys": [entry]}).encode())] == [
        Limits(60, 9000, 4)
    ]


@pytest.mark.parametrize(
    "text",
    [
        *(",", "ann:a,", SECRET, f":{SECRET}", "ann:", f"a b:{SECRET}", f"{'a' * 65}:{SECRET}"),
        *(f"ann:{SECRET} x", f"ann:{SECRET}é", "ann:" + SECRET * 50, f"ann:sha256:{SECRET}"),
        *(f"ann:{SECRET},ann:b", f"ann:{SECRET},bob:{SECRET}", f"ann:{SECRET},bob:{DIGEST}"),
    ],
)
def test_wrong_variable_is_refused_without_its_secrets(text: str) -> None:
    with pytest.raises(BadKeys) as raised:
        read_pairs(text)
    assert SECRET not in str(raised.value)


# content of a file -> what is said of it
WRONG: dict[str, str] = {
    "": "not JSON",
    "{": "not JSON",
    "[" * 100_000: "not JSON",
    "[]": "the file: ",
    "{}": "keys: Field required",
    '{"keys": []}': "keys: ",
    '{"keys": {}}': "keys: ",
    '{"SECRET": "ann"}': "keys: Field required",
    '{"keys": [{"name": "a", "secret": "b"}], "SECRET": 1}': "the file: a field is none of",
    '{"keys": ["SECRET"]}': "keys[0]: ",
    '{"keys": [{"name": "ann"}]}': "keys[0].secret: Field required",
    '{"keys": [{"secret": "SECRET"}]}': "keys[0].name: Field required",
    '{"keys": [{"name": "a", "secret": "b", "SECRET": 1}]}': "keys[0]: a field is none of",
    '{"keys": [{"name": "a b", "secret": "SECRET"}]}': "keys[0].name: a name must be",
    '{"keys": [{"name": "a", "secret": ["SECRET"]}]}': "keys[0].secret: a secret must be",
    '{"keys": [{"name": "a", "secret": "SECRET é"}]}': "keys[0].secret: a secret must be",
    '{"keys": [{"name": "a", "secret": "\\ud800"}]}': "keys[0].secret: a secret must be",
    '{"keys": [{"name": "a", "secret": "sha256:SECRET"}]}': "keys[0].secret: sha256:",
    '{"keys": [{"name": "a", "secret": "b", "secret": "SECRET"}]}': "has a field twice",
    **{
        f'{{"keys": [{{"name": "a", "secret": "b", "{name}": {value}}}]}}': f"keys[0].{name}: "
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
        for value in ("0", "-1", "1.5", '"60"', "true", "1e999", "1000000001")
    },
    '{"keys": [{"name": "a", "secret": "b"}, {"name": "a", "secret": "c"}]}': "the name a",
    '{"keys": [{"name": "a", "secret": "SECRET"}, {"name": "b", "secret": "DIGEST"}]}': (
        "a and b have the same secret"
    ),
}


@pytest.mark.parametrize(("content", "said"), WRONG.items(), ids=range(len(WRONG)))
def test_wrong_file_is_refused_with_the_place_and_without_its_secrets(
    content: str, said: str
) -> None:
    with pytest.raises(BadKeys) as raised:
        parse_file(content.replace("SECRET", SECRET).replace("DIGEST", DIGEST).encode())
    assert said in str(raised.value)
    assert SECRET not in str(raised.value)


def test_file_of_too_many_keys_or_bytes_is_refused(tmp_path: Path) -> None:
    keys = [{"name": f"k{i}", "secret": f"s{i}"} for i in range(MAX_KEYS + 1)]
    path = tmp_path / "keys.json"
    parse_file(written(path, *keys[1:]).read_bytes())
    with pytest.raises(BadKeys, match="at most 1000"):
        parse_file(written(path, *keys).read_bytes())
    path.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(BadKeys, match="larger than"):
        read_file(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "keys.json")
    with pytest.raises(BadKeys, match="not a file"):
        read_file(tmp_path / "keys.json")


def test_secrets_are_in_no_repr() -> None:
    [key] = read_pairs(f"ann:{SECRET}")
    assert repr(key) == f"Key(name='ann', limits={Limits()!r})"


def test_secret_of_the_admin_is_no_keys(tmp_path: Path) -> None:
    keys = read_pairs(f"ann:a,bob:{DIGEST}")
    assert check_apart([*keys], "other") == check_apart([*keys]) == keys
    with pytest.raises(BadKeys, match="^bob has the same secret as ADMIN_API_KEY$"):
        check_apart([*keys], SECRET)


# --- the ring -------------------------------------------------------------------------------------


def owner(ring: KeyRing, secret: str) -> str | None:
    key = ring.find(secret)
    return key.name if key else None


def test_without_keys_none_is_needed_and_none_is_found() -> None:
    ring = KeyRing((), None)
    ring.refresh()
    assert (ring.is_needed, ring.find("")) == (False, None)


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All digests are of one length, and `compare_digest` takes as long for all of them."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def count(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(key_ring.hmac, "compare_digest", count)
    ring = KeyRing(read_pairs("a:1,b:22,c:333"), None)
    for secret, expected in [("1", "a"), ("22", "b"), ("333", "c"), ("4", None), ("", None)]:
        compared.clear()
        assert owner(ring, secret) == expected
        assert compared == [(32, 32)] * 3


def test_changed_file_takes_effect_and_keys_of_the_variable_stay(tmp_path: Path) -> None:
    path = written(tmp_path / "keys.json", {"name": "bob", "secret": "b"})
    ring = KeyRing(read_pairs("ann:a"), path)
    assert [owner(ring, each) for each in "abc"] == ["ann", "bob", None]
    written(path, {"name": "bob", "secret": "c", "concurrent_requests": 2})
    ring.refresh()
    assert [owner(ring, each) for each in "abc"] == ["ann", None, "bob"]
    found = ring.find("c")
    assert found is not None
    assert found.limits == Limits(concurrent_requests=2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b'{"keys": []}', "keys: "),
        (b'{"keys": [{"name": "ann", "secret": "z"}]}', "two keys have the name ann"),
        (b'{"keys": [{"name": "zoe", "secret": "a"}]}', "ann and zoe have the same secret"),
        (b'{"keys": [{"name": "zoe", "secret": "y"}]}', "zoe has the same secret as ADMIN_API_KEY"),
        (None, "cannot be read: No such file"),
    ],
)
def test_broken_or_deleted_file_changes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None, said: str
) -> None:
    path = written(tmp_path / "keys.json", {"name": "bob", "secret": "b"})
    right = path.read_bytes()
    ring = KeyRing(read_pairs("ann:a"), path, "y")
    caplog.set_level("INFO", "app.key_ring")
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    for _ in range(3):
        ring.refresh()
        assert [owner(ring, each) for each in "abyz"] == ["ann", "bob", None, None]
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith(f"API_KEYS_FILE: {path}: ")
    assert said in record.getMessage()
    assert record.getMessage().endswith("the 2 keys that were known still count")
    path.write_bytes(right)
    ring.refresh()
    written(path, {"name": "zoe", "secret": "z"})
    ring.refresh()
    assert [record.levelno for record in caplog.records[1:]] == [logging.INFO] * 2
    assert owner(ring, "z") == "zoe"


def test_file_that_breaks_before_the_start_lets_nobody_in(tmp_path: Path) -> None:
    ring = KeyRing((), tmp_path / "gone.json")
    assert (ring.is_needed, ring.find("a")) == (True, None)
