"""The socket side on a real gevent server in this process: time limits, full servers, fairness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import gevent
import gevent.event
import pytest
from gevent import socket
from gevent.pywsgi import WSGIHandler

from app import connection, edge
from app.edge import Edge

from .services import until
from .sockets import GET, LAST_GET, Client, chunked, post, serving

BODY = b'{"prompt": "a"}'
SOON = 100  # milliseconds: a limit that is waited for
LATE = 30_000  # one that is not


def plain_app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "2")])
    return [b"ok"]


@pytest.fixture(scope="module")
def server() -> Iterator[Edge]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def hurried() -> Iterator[Edge]:
    """Waits for a request and its parts for a moment only."""
    with serving(
        **{f"{name}_timeout_ms": SOON for name in ("header", "keepalive", "read", "body")}
    ) as server:
        yield server


def test_socket_is_told_not_to_wait_and_when_a_peer_has_vanished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nagle's algorithm would hold answers back for a delayed ACK."""
    options: dict[str, int] = {}
    run_application = WSGIHandler.run_application

    def look(handler: WSGIHandler) -> None:
        for name in ("NODELAY", "USER_TIMEOUT", "KEEPIDLE", "KEEPINTVL", "KEEPCNT"):
            number = getattr(socket, f"TCP_{name}")
            options[name] = handler.socket.getsockopt(socket.IPPROTO_TCP, number)
        options["alive"] = handler.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        run_application(handler)

    monkeypatch.setattr(WSGIHandler, "run_application", look)
    with serving(plain_app, tcp_user_timeout_ms=12_000) as server, Client(server) as client:
        assert client.send(LAST_GET).only_reply().body == b"ok"
    assert options.pop("KEEPIDLE") + options.pop("KEEPINTVL") * options.pop("KEEPCNT") == 12
    assert options == {"NODELAY": 1, "USER_TIMEOUT": 12_000, "alive": 1}


# What has been sent when the client falls silent -> what it is told.
SILENT: dict[str, tuple[bytes, int]] = {
    "request line": (b"GET / HT", 408),
    "headers": (GET[:-2], 408),
    "body": (post(BODY)[:-1], 408),
    "whole body": (post(BODY).removesuffix(BODY), 408),
    "chunk's size": (chunked(b"f"), 408),
    "chunk": (chunked(b"f\r\n{"), 408),
    "chunk's end": (chunked(b"f\r\n" + BODY), 408),
    "next chunk": (chunked(b"f\r\n" + BODY + b"\r\n"), 408),
    "trailers": (chunked(b"f\r\n" + BODY + b"\r\n0\r\nA: b\r\n"), 408),
}


@pytest.mark.parametrize(("sent", "status"), SILENT.values(), ids=SILENT)
def test_client_that_falls_silent_gets_a_408_and_the_connection_ends(
    hurried: Edge, sent: bytes, status: int
) -> None:
    with Client.early(hurried, sent) as client:
        reply = client.only_reply()
    assert (reply.status, reply.code) == (status, "request_timeout")
    assert reply.headers["connection"] == "close"


@pytest.mark.parametrize("sent", [b"", GET, post(BODY)], ids=["new", "used", "used for a body"])
def test_idle_connection_is_closed_without_a_word(hurried: Edge, sent: bytes) -> None:
    with Client.early(hurried, sent) as client:
        if sent:
            assert client.read().status == 200
        assert client.read_to_end() == b""


@pytest.mark.parametrize(
    ("limit", "request_"),
    [
        ("header", GET[:-2] + b"A: " + b"b" * 5000),
        ("body", post(b" " * 5000)),
        ("body", chunked(b"1\r\n \r\n" * 5000)),
    ],
    ids=["headers", "body", "chunks"],
)
def test_client_that_dribbles_runs_out_of_time(limit: str, request_: bytes) -> None:
    """Each byte comes in good time, all of them do not."""
    limits = {f"{name}_timeout_ms": LATE for name in ("header", "read", "body")}
    with serving(**limits | {f"{limit}_timeout_ms": SOON}) as server, Client(server) as client:
        start = len(request_) - 5000
        client.send(request_[:start])

        def dribble() -> None:
            for byte in request_[start:]:
                client.send(bytes([byte]))
                gevent.sleep(0.005)

        with Task(dribble):
            assert client.only_reply().code == "request_timeout"


class Task:
    """Runs beside the test, and ends with it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._greenlet = gevent.spawn(self._until_closed, work)

    def _until_closed(self, work: Callable[[], object]) -> None:
        with suppress(OSError):  # the server had enough
            work()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._greenlet.kill()


def test_client_that_does_not_read_is_left(caplog: pytest.LogCaptureFixture) -> None:
    closed = []

    class Answer:
        def __iter__(self) -> Iterator[bytes]:
            for _ in range(1000):
                yield b" " * 100_000

        def close(self) -> None:
            closed.append(True)

    def app(environ: dict[str, Any], start_response: Any) -> Answer:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return Answer()

    with caplog.at_level("INFO", "app.access"), serving(app, write_timeout_ms=SOON) as server:
        with Client(server) as client:
            client.send(GET)
            until(lambda: closed)
        until(lambda: caplog.records)
    assert [record.msg["status"] for record in caplog.records] == [499]


def test_time_limit_of_a_write_is_one_of_64_kib_not_of_the_whole_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a client that reads slowly, but reads, gets it all. A call of gevent's `sendall` has
    its limit for all that it is given."""
    size, limits, sizes = 12 << 20, [], []
    sendall = socket.socket.sendall

    def watched(sent_by: Any, data: Any, flags: int = 0) -> None:
        if sent_by.getsockname()[1] == server.server_port:
            limits.append(sent_by.gettimeout())
            sizes.append(len(data))
        sendall(sent_by, data, flags)

    monkeypatch.setattr(socket.socket, "sendall", watched)

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Length", str(size))])
        return [b" " * size]

    with serving(app, write_timeout_ms=LATE) as server, Client(server) as client:
        client.send(LAST_GET)
        received = 0
        while data := client.socket.recv(1 << 20):
            received += len(data)
    assert received > size
    assert set(limits) == {LATE / 1000}
    assert max(sizes) == 65536


def test_full_server_answers_health_and_metrics_and_refuses_the_rest() -> None:
    with serving(max_connections=2, reserved_connections=2) as server, ExitStack() as stack:
        residents = [stack.enter_context(Client(server)) for _ in range(2)]
        for resident in residents:
            assert resident.send(GET).read().status == 200
        for path, status in [("/health/live", 200), ("/health/ready", 200), ("/metrics", 200)]:
            with Client.early(server, GET.replace(b"/health/live", path.encode())) as client:
                reply = client.only_reply()
                assert (reply.status, reply.headers["connection"]) == (status, "close")
        with Client.early(server, post(BODY) + GET) as client:
            reply = client.only_reply()
        assert (reply.status, reply.code) == (503, "too_many_connections")
        assert reply.headers["retry-after"] == "1"
        assert residents[0].send(post(BODY)).read().status == 200
        residents[1].socket.close()
        until(lambda: len(server.open) == 1)
        with Client(server) as client:
            assert client.send(post(BODY)).read().status == 200


def test_silent_clients_do_not_hold_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health waits for a place in it for a second at most."""
    monkeypatch.setattr(connection, "_SPARE_SECONDS", SOON / 1000)
    with serving(max_connections=1, reserved_connections=2) as server, ExitStack() as stack:
        for sent in (GET, b"", b"GET / HT", b"", b"GET "):
            stack.enter_context(Client(server)).send(sent)
        with Client.early(server, GET) as client:
            assert client.read().status == 200


def test_pipelining_client_does_not_starve_another(server: Edge) -> None:
    num_requests, num_answers = 2000, 0
    with Client(server) as greedy, Client(server) as other:

        def count() -> None:
            nonlocal num_answers
            for _ in range(num_requests):
                assert greedy.read().status == 200
                num_answers += 1

        with Task(lambda: greedy.send(GET * num_requests)), Task(count):
            until(lambda: num_answers)
            for _ in range(5):
                assert other.send(GET).read().status == 200
            assert num_answers < num_requests / 4
            until(lambda: num_answers == num_requests)


def test_body_of_tiny_chunks_does_not_starve_another() -> None:
    body = b'{"prompt": "' + b"a" * 99_000 + b'"}'
    request = chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    with serving(plain_reader) as server, Client(server) as greedy, Client(server) as other:
        answered: list[int] = []
        with Task(lambda: answered.append(greedy.send(request).read().status)):
            for _ in range(5):
                assert other.send(GET).read().status == 200
            assert not answered
            until(lambda: answered)
    assert answered == [200]


def plain_reader(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    environ["wsgi.input"].read()
    return plain_app(environ, start_response)


@pytest.mark.parametrize("path", ["/health/live", "/info", "/metrics", "/v1/models", "/docs"])
def test_head_of_a_get_route_is_its_head_alone(server: Edge, path: str) -> None:
    get = LAST_GET.replace(b"/health/live", path.encode())
    with Client(server) as client:
        whole = client.send(get).only_reply()
    with Client(server) as client:
        head, _, body = client.send(b"HEAD" + get[3:]).read_to_end().partition(b"\r\n\r\n")
    assert (head.split()[1], body) == (b"200", b"")
    assert f"content-type: {whole.headers['content-type']}".encode() in head.lower()


def test_head_of_a_stream_has_no_body_either() -> None:
    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return iter(())

    with serving(app) as server, Client(server) as client:
        received = client.send(b"HEAD" + GET[3:] + b"HEAD" + LAST_GET[3:]).read_to_end()
    parts = received.split(b"\r\n\r\n")
    assert [part[:12] for part in parts] == [b"HTTP/1.1 200", b"HTTP/1.1 200", b""]


def test_client_that_sends_on_after_a_refusal_still_reads_it(server: Edge) -> None:
    """A connection that is closed with bytes unread is reset, and the answer lost on the way."""
    with Client(server) as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        client.send(post(b" " * 3_000_000))
        assert client.only_reply().code == "payload_too_large"


def test_refused_head_has_no_body(server: Edge) -> None:
    request = b"HEAD /health/live HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n"
    with Client(server) as client:
        head, _, body = client.send(request).read_to_end().partition(b"\r\n\r\n")
    assert (head.split()[1], body) == (b"400", b"")


@pytest.mark.parametrize(
    ("path", "status"), [("/health/live", 200), ("/nope", 404), ("/generate", 405)]
)
def test_body_that_nobody_reads_never_runs_as_a_request(
    server: Edge, path: str, status: int
) -> None:
    """If it has come with the headers it is skipped; else the connection ends."""
    line = b"GET " + path.encode()
    whole = line + GET.removeprefix(b"GET /health/live")[:-2]
    whole += b"Content-Length: %d\r\n\r\n" % len(GET)
    with Client(server) as client:
        assert client.send(whole + GET + LAST_GET).read().status == status
        assert client.only_reply().status == 200
    with Client(server) as client:
        reply = client.send(whole).only_reply()
    assert (reply.status, reply.headers["connection"]) == (status, "close")
    with Client(server) as client:
        unread = whole.split(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
        assert client.send(unread + b"0\r\n\r\n" + GET).only_reply().status == status


@pytest.mark.parametrize(
    ("line", "version", "closes"),
    [
        (b"", b"1.1", False),
        (b"Connection: close\r\n", b"1.1", True),
        (b"Connection: TE, Close\r\n", b"1.1", True),
        (b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"1.1", False),
        (b"", b"1.0", True),
        (b"Connection: Keep-Alive\r\n", b"1.0", False),
    ],
)
def test_connection_is_kept_as_the_client_wishes(
    server: Edge, line: bytes, version: bytes, closes: bool
) -> None:
    request = b"GET /health/live HTTP/%b\r\nHost: x\r\n%b\r\n" % (version, line)
    with Client(server) as client:
        reply = client.send(request).read()
        assert (reply.status, reply.headers.get("connection") == "close") == (200, closes)
        rest = client.send(LAST_GET).read_to_end() if not closes else client.read_to_end()
    assert bool(rest) != closes


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_stream_of_unknown_length_has_an_end_for_every_client(server: Edge, version: bytes) -> None:
    """HTTP/1.0 has no chunks: there the connection's end is the stream's."""
    line = b"Connection: keep-alive"
    body = b'{"prompt": "a", "stream": true, "max_tokens": 3, "ignore_eos": true}'
    request = post(body, line, path=b"/generate").replace(b"HTTP/1.1", b"HTTP/" + version)
    with Client(server) as client:
        if version == b"1.1":
            client.send(request + LAST_GET)
            assert b"\r\n0\r\n\r\nHTTP/1.1 200" in client.read_to_end()
            return
        head, _, events = client.send(request).read_to_end().partition(b"\r\n\r\n")
    assert [row for row in head.lower().split(b"\r\n") if row.startswith(b"connection")] == [
        b"connection: close"
    ]
    assert events.startswith(b"data: ") and b'"usage"' in events


def test_answer_that_closes_says_so_to_http_1_0_as_well(server: Edge) -> None:
    """Here for a body that has not come."""
    head = b"GET /health/live HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n"
    with Client(server) as client:
        reply = client.send(head + b"Content-Length: 9\r\n\r\n").only_reply()
    assert (reply.status, reply.headers["connection"]) == (200, "close")


def test_headers_of_a_request_reach_the_app_and_those_with_underscores_do_not() -> None:
    seen: dict[str, Any] = {}

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        seen.update(environ)
        return plain_app(environ, start_response)

    with serving(app) as server, Client(server) as client:
        lines = b"A-B: 1\r\na-b: 2\r\nC_D: 3\r\nContent_Length: 9\r\nProxy: x\r\n"
        client.send(b"GET /a%20b?c=%20 HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n").read()
    assert (seen["PATH_INFO"], seen["QUERY_STRING"]) == ("/a b", "c=%20")
    assert (seen["HTTP_A_B"], seen["HTTP_HOST"]) == ("1,2", "x")
    assert not {"HTTP_C_D", "CONTENT_LENGTH", "HTTP_CONTENT_LENGTH"} & seen.keys()
    assert (seen["REMOTE_ADDR"], seen["SERVER_PROTOCOL"]) == ("127.0.0.1", "HTTP/1.1")


@pytest.mark.parametrize("when", ["before", "amid"])
def test_app_that_fails_ends_its_connection_without_a_trace(when: str) -> None:
    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        if when == "amid":
            yield b"a"
        raise KeyError("secret detail")

    with serving(app) as server, Client(server) as client:
        received = client.send(GET + GET).read_to_end()
    assert received.count(b"HTTP/1.1 ") == 1
    assert received.startswith(b"HTTP/1.1 500 " if when == "before" else b"HTTP/1.1 200 ")
    assert b"secret" not in received
    assert not received.endswith(b"0\r\n\r\n")  # cut off, and seen to be


def test_answers_of_refused_requests_are_counted() -> None:
    with serving() as server:
        for request in (b"GET\r\n\r\n", b"GET\r\n\r\n", GET + post(BODY, b"Expect: x")):
            with Client(server) as client:
                client.send(request).read_to_end()
        with Client(server) as client:
            metrics = client.send(GET.replace(b"/health/live", b"/metrics")).read().body
    assert b'requests_rejected_total{reason="malformed_request"} 2.0' in metrics
    assert b'requests_rejected_total{reason="expectation_failed"} 1.0' in metrics


def test_stop_closes_idle_connections_at_once_and_lets_answers_end() -> None:
    started, go_on = gevent.event.Event(), gevent.event.Event()

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if environ["PATH_INFO"] == "/slow":
            started.set()
            go_on.wait()
        return plain_app(environ, start_response)

    with serving(app) as server, Client(server) as idle, Client(server) as busy:
        assert idle.send(GET).read().status == 200
        busy.send(GET.replace(b"/health/live", b"/slow"))
        started.wait()
        stopping = gevent.spawn(server.stop, 20)
        assert idle.read_to_end() == b""
        go_on.set()
        reply = busy.only_reply()
        busy.socket.close()
        stopping.join()
    assert (reply.body, reply.headers["connection"]) == (b"ok", "close")


def test_stop_does_not_wait_for_a_connection_between_two_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not idle yet, and is not closed with those that are."""
    stands, go_on = gevent.event.Event(), gevent.event.Event()

    def next_turn() -> None:
        stands.set()
        go_on.wait()

    monkeypatch.setattr(connection, "next_turn", next_turn)
    with serving(plain_app, keepalive_timeout_ms=10 * LATE) as server, Client(server) as client:
        client.send(GET).read()
        stands.wait()
        stopping = gevent.spawn(server.stop, 10 * LATE)
        until(lambda: server.is_stopping)
        go_on.set()
        with gevent.Timeout(5):  # long before the connection was idle for too long
            assert client.read_to_end() == b""
        client.socket.close()
        stopping.join()


def test_more_connections_than_files_are_told_and_not_promised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(edge.resource, "getrlimit", lambda which: (256, 1024))
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(edge.resource, "setrlimit", lambda which, to: raised.append(to))
    with serving(plain_app, max_connections=2000, reserved_connections=24) as server:
        assert (server.max_connections, raised) == (1024 - 24 - 256, [(1024, 1024)])
    assert "MAX_CONNECTIONS=2000" in caplog.text
