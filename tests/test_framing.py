"""Hostile and odd requests on raw sockets: what could be read in two ways gets one answer, and
nothing behind it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gevent
import pytest

from app.edge import Edge

from .sockets import GET, LAST_GET, Client, chunked, post, serving

BODY = b'{"prompt": "a"}'
ONE_CHUNK = b"f\r\n" + BODY + b"\r\n"
LIMITS = {
    "max_request_line": 100,
    "max_header_bytes": 300,
    "max_headers": 6,
    "max_body_bytes": 1000,
    "max_json_depth": 8,
}


def get(*lines: bytes) -> bytes:
    return b"\r\n".join([b"GET /health/live HTTP/1.1", b"Host: x", *lines, b"", b""])


def with_length(value: bytes, *lines: bytes) -> bytes:
    head = [b"POST /tokenize HTTP/1.1", b"Host: x", b"Content-Type: application/json"]
    return b"\r\n".join([*head, b"Content-Length: " + value, *lines, b"", BODY])


MALFORMED: dict[str, bytes] = {
    # which line, and where it ends
    "no version, as in HTTP/0.9": b"GET /health/live\r\n\r\n",
    "version 0.9": b"GET /health/live HTTP/0.9\r\nHost: x\r\n\r\n",
    "version 1.2": b"GET /health/live HTTP/1.2\r\nHost: x\r\n\r\n",
    "version 2.0": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version 11": b"GET /health/live HTTP/11\r\nHost: x\r\n\r\n",
    "version 1.1.1": b"GET /health/live HTTP/1.1.1\r\nHost: x\r\n\r\n",
    "version with a sign": b"GET /health/live HTTP/+1.1\r\nHost: x\r\n\r\n",
    "version without a number": b"GET /health/live HTTP/x\r\nHost: x\r\n\r\n",
    "version in small letters": b"GET /health/live http/1.1\r\nHost: x\r\n\r\n",
    "two spaces": b"GET  /health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tab for a space": b"GET\t/health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "four words": b"GET /health/live x HTTP/1.1\r\nHost: x\r\n\r\n",
    "one word": b"GET\r\n\r\n",
    "space in front": b" GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "two empty lines in front": b"\r\n\r\nGET /health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "method that is no token": b"GE(T /health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "endless method": b"G" * 60 + b" /health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "target that is no path": b"GET health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "target with a fragment": b"GET /health/live#a HTTP/1.1\r\nHost: x\r\n\r\n",
    "target of a proxy": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "target beyond ASCII": b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in the target": b"GET /health/live\0 HTTP/1.1\r\nHost: x\r\n\r\n",
    "bare LF": b"GET /health/live HTTP/1.1\nHost: x\n\n",
    "bare LF between headers": b"GET /health/live HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    "bare LF at the end": b"GET /health/live HTTP/1.1\r\nHost: x\r\n\n",
    "bare CR in the request line": b"GET /health/live HTTP/1.1\rHost: x\r\n\r\n",
    "bare CR in a header": get(b"A: b\rC: d"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    # headers
    "obs-fold": get(b"A: b", b" c"),
    "obs-fold with a tab": get(b"A: b", b"\tc"),
    "obs-fold first": b"GET /health/live HTTP/1.1\r\n Host: x\r\n\r\n",
    "space before the colon": get(b"A : b"),
    "space before the colon of a length": with_length(b"15", b"Content-Length : 3"),
    "no colon": get(b"A"),
    "no name": get(b": b"),
    "name that is no token": get(b"A(b: c"),
    "name beyond ASCII": get(b"\xc3\xa9: c"),
    "NUL in a value": get(b"A: b\0c"),
    "NUL in a name": get(b"A\0: b"),
    "control character in a value": get(b"A: b\x08c"),
    "DEL in a value": get(b"A: b\x7f"),
    # Host
    "no Host": b"GET /health/live HTTP/1.1\r\n\r\n",
    "two Hosts": get(b"Host: y"),
    "the same Host twice": get(b"Host: x"),
    "Host with a path": b"GET /health/live HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "Host with a space": b"GET /health/live HTTP/1.1\r\nHost: x y\r\n\r\n",
    "Host with a user": b"GET /health/live HTTP/1.1\r\nHost: a@x\r\n\r\n",
    "two Hosts in HTTP/1.0": b"GET /health/live HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n",
    # length
    "length with a sign": with_length(b"+15"),
    "negative length": with_length(b"-15"),
    "length as a list": with_length(b"15, 15"),
    "length in hexadecimal": with_length(b"0xf"),
    "length with a point": with_length(b"15.0"),
    "length with an underscore": with_length(b"1_5"),
    "length in other digits": with_length("١٥".encode()),
    "empty length": with_length(b""),
    "endless length": with_length(b"1" * 60),
    "two lengths": with_length(b"15", b"Content-Length: 3"),
    "the same length twice": with_length(b"15", b"Content-Length: 15"),
    "length in the second place": with_length(b"15", b"content-length: 0"),
    # coding
    "coding and length": chunked(ONE_CHUNK + b"0\r\n\r\n", b"Content-Length: 3"),
    "gzip, chunked": post(ONE_CHUNK).replace(
        b"Content-Length: 20", b"Transfer-Encoding: gzip, chunked"
    ),
    "chunked, identity": with_length(b"15").replace(
        b"Content-Length: 15", b"Transfer-Encoding: chunked, identity"
    ),
    "chunked, chunked": chunked(ONE_CHUNK + b"0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "identity": with_length(b"15").replace(b"Content-Length: 15", b"Transfer-Encoding: identity"),
    "xchunked": with_length(b"15").replace(b"Content-Length: 15", b"Transfer-Encoding: xchunked"),
    "chunked behind a vertical tab": with_length(b"15").replace(
        b"Content-Length: 15", b"Transfer-Encoding: \x0bchunked"
    ),
    "quoted chunked": with_length(b"15").replace(
        b"Content-Length: 15", b'Transfer-Encoding: "chunked"'
    ),
    "coding and the empty one": chunked(ONE_CHUNK + b"0\r\n\r\n", b"Transfer-Encoding: "),
    "coding in HTTP/1.0": chunked(ONE_CHUNK + b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"),
    # others that count once
    "two types": with_length(b"15", b"Content-Type: text/plain"),
    "two keys": get(b"Authorization: a", b"Authorization: b"),
}
UNREADABLE: dict[str, bytes] = {
    "size that is no number": b"xyz\r\n{}\r\n0\r\n\r\n",
    "no size": b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size with a prefix": b"0xf\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size with a sign": b"+f\r\n" + BODY + b"\r\n0\r\n\r\n",
    "negative size": b"-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size with a space in front": b" f\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size with an underscore": b"0_f\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size with a NUL": b"f\0\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size of many digits": b"0" * 20 + b"f\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size behind a bare LF": b"f\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk behind a bare CR": b"f\r" + BODY + b"\r\n0\r\n\r\n",
    "chunk longer than its size": b"e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk shorter than its size": b"10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk that ends with a bare LF": b"f\r\n" + BODY + b"\n0\r\n\r\n",
    "last chunk with a bare LF": ONE_CHUNK + b"0\n\n",
    "long extension": b"f;" + b"a" * 300 + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "many extensions": (b"1;" + b"a" * 200 + b"\r\n \r\n") * 30 + ONE_CHUNK + b"0\r\n\r\n",
    "extension with a control character": b"f;a=\x01\r\n" + BODY + b"\r\n0\r\n\r\n",
    "extension with a bare LF": b"f;\n" + BODY + b"\r\n0\r\n\r\n",
    "long trailer": ONE_CHUNK + b"0\r\nA: " + b"b" * 5000 + b"\r\n\r\n",
    "many trailers": ONE_CHUNK + b"0\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
    "trailer that is no field": ONE_CHUNK + b"0\r\nGET /health/live HTTP/1.1\r\n\r\n",
    "trailer with a space before the colon": ONE_CHUNK + b"0\r\nA : b\r\n\r\n",
}
TOO_MUCH: dict[str, tuple[bytes, int]] = {
    "request line": (b"GET /" + b"a" * 100 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "request line without an end": (b"GET /" + b"a" * 200, 414),
    "header": (get(b"A: " + b"b" * 300), 431),
    "header without an end": (get(b"A: " + b"b" * 400)[:-4], 431),
    "headers together": (get(*[b"A: " + b"b" * 90] * 4), 431),
    "number of headers": (get(*[b"A: b"] * 6), 431),
    "announced body": (post(b" " * 1001), 413),
    "announced body of a route that takes none": (get(b"Content-Length: 1001"), 413),
    "chunk": (chunked(b"3e9\r\n"), 413),
    "chunks together": (chunked((b"fa\r\n" + b" " * 250 + b"\r\n") * 4 + ONE_CHUNK), 413),
    "expectation": (post(BODY, b"Expect: 200-ok"), 417),
    "two expectations": (post(BODY, b"Expect: 100-continue, x"), 417),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Edge]:
    with serving(**LIMITS) as server:
        yield server


def check_refused(server: Edge, request: bytes, status: int, code: str | None = None) -> None:
    """One answer, whatever comes behind it, and the end of the connection."""
    with Client(server) as client:
        reply = client.send(request + GET + GET).only_reply()
    assert (reply.status, reply.headers["connection"]) == (status, "close")
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert reply.code == code or code is None


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=MALFORMED)
def test_malformed_request_is_refused_and_nothing_behind_it_runs(
    server: Edge, request_: bytes
) -> None:
    check_refused(server, request_, 400, "malformed_request")


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
def test_body_with_broken_chunks_is_refused_and_its_rest_does_not_run(
    server: Edge, body: bytes
) -> None:
    check_refused(server, chunked(body), 400, "unreadable_body")


@pytest.mark.parametrize(("request_", "status"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_what_is_too_much_is_refused_with_its_own_status(
    server: Edge, request_: bytes, status: int
) -> None:
    check_refused(server, request_, status)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health/live HTTP/1.1\r\nHost: x:80\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nHost: [::1]:80\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nHost:\r\n\r\n",
        b"GET http://x/health/live HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health/live?a=b%0a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health/live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"\r\nGET /health/live HTTP/1.1\r\nHost: x\r\n\r\n",
        get(b"A:b", b"A: c", b"Empty:", b"A_b: c", b"Latin: \xe9"),
        get(b"Content-Length: 0"),
        get(b"Content-Length: 3")[:-2] + b"\r\nabc",
        b"GET /health/live HTTP/1.0\r\nConnection: keep-alive\r\nExpect: x\r\n\r\n",
        post(BODY),
        chunked(ONE_CHUNK + b"0\r\n\r\n"),
        chunked(ONE_CHUNK + b"000\r\n\r\n"),
        chunked(b'0f ; a="b"\r\n' + BODY + b"\r\n0;c\r\nA: b\r\n\r\n"),
        chunked(b"3\r\n" + BODY[:3] + b"\r\nC\r\n" + BODY[3:] + b"\r\n0\r\n\r\n"),
        chunked(ONE_CHUNK + b"0\r\n\r\n").replace(b": chunked", b": CHUNKED"),
    ],
)
def test_what_is_right_is_answered_and_the_next_request_too(server: Edge, request_: bytes) -> None:
    with Client(server) as client:
        first = client.send(request_ + LAST_GET).read()
        assert (first.status, client.only_reply().status) == (200, 200)


def test_right_requests_may_come_byte_by_byte(server: Edge) -> None:
    with Client(server) as client:
        for byte in chunked(ONE_CHUNK + b"0\r\nA: b\r\n\r\n") + LAST_GET:
            client.send(bytes([byte]))
            gevent.sleep(0)
        assert [client.read().status, client.only_reply().status] == [200, 200]


@pytest.mark.parametrize("end", range(1, len(post(BODY))))
def test_request_that_ends_early_gets_a_400(server: Edge, end: int) -> None:
    with Client(server) as client:
        reply = client.send(post(BODY)[:end]).end().only_reply()
    assert reply.status == 400


@pytest.mark.parametrize("size", [1000, 1001])
def test_chunked_body_is_read_whole_or_refused(server: Edge, size: int) -> None:
    """What lies behind the limit would make it valid: nothing is cut off in silence."""
    body = BODY[:-1] + b" " * (size - len(BODY)) + b"}"
    with Client(server) as client:
        request = chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), b"Connection: close")
        assert client.send(request).only_reply().status == (200 if size == 1000 else 413)


@pytest.mark.parametrize("depth", [7, 8, 100])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_body_that_is_too_deep_is_told_so(server: Edge, depth: int, opening: bytes) -> None:
    """One less is a wrong value; the object around it counts as well."""
    value = opening * depth + b"1" + (b"]" if opening == b"[" else b"}") * depth
    with Client(server) as client:
        request = post(b'{"prompt": ' + value + b"}", b"Connection: close")
        reply = client.send(request).only_reply()
    assert reply.status == 400
    assert (b"MAX_JSON_DEPTH" in reply.body) == (depth > 7)


def test_brackets_within_strings_are_not_depth(server: Edge) -> None:
    with Client(server) as client:
        request = post(b'{"prompt": "' + b"[{" * 20 + b'"}', b"Connection: close")
        assert client.send(request).only_reply().status == 200


@pytest.mark.parametrize("route", ["right", "unread"])
def test_100_is_sent_only_when_the_body_is_read(server: Edge, route: str) -> None:
    head, _, body = post(BODY, b"Expect: 100-continue").partition(b"\r\n\r\n")
    head += b"\r\n\r\n"
    if route == "unread":
        head = head.replace(b"application/json", b"text/plain")
    with Client(server) as client:
        first = client.send(head).read()
        if route == "unread":
            assert (first.status, first.headers["connection"]) == (415, "close")
            assert client.send(body + GET).read_to_end() == b""
        else:
            assert first.status == 100
            assert client.send(body).read().status == 200
            assert client.send(LAST_GET).only_reply().status == 200


@pytest.mark.parametrize("whole", [post, chunked])
def test_100_is_not_sent_for_a_body_that_has_come_already(
    server: Edge, whole: Callable[..., bytes]
) -> None:
    body = BODY if whole is post else ONE_CHUNK + b"0\r\n\r\n"
    with Client(server) as client:
        request = whole(body, b"Expect: 100-continue", b"Connection: close")
        assert client.send(request).only_reply().status == 200


def test_100_is_sent_for_chunks_too(server: Edge) -> None:
    with Client(server) as client:
        assert client.send(chunked(b"", b"Expect: 100-continue")).read().status == 100
        assert client.send(ONE_CHUNK + b"0\r\n\r\n").read().status == 200


def test_too_large_a_body_is_refused_without_a_100(server: Edge) -> None:
    request = post(b" " * 1001, b"Expect: 100-continue")
    with Client(server) as client:
        reply = client.send(request.partition(b"\r\n\r\n")[0] + b"\r\n\r\n").only_reply()
    assert reply.status == 413
