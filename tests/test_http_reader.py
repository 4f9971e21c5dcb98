"""An HTTP answer, fed in pieces of any size."""

from __future__ import annotations

import pytest
from http_reader import BadAnswer, ResponseReader, take_events

STREAM = b': hello\n\ndata: {"text": "caf\xc3\xa9"}\n\ndata: {"text": "", "usage": {}}\r\n\r\n'
STREAM += b"data: [DONE]\n\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\nb;x=1\r\n"
CHUNKED += b"efghijklmno\r\n0\r\n\r\n"
PLAIN = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 3\r\nRetry-After:  2 \r\n\r\nabc"
ENDLESS = b"HTTP/1.0 200 OK\r\n\r\nabc"


def feed(data: bytes, size: int) -> tuple[ResponseReader, bytes]:
    reader, body = ResponseReader(), b""
    for at in range(0, len(data), size):
        assert not reader.is_done
        body += reader.feed(data[at : at + size])
    return reader, body


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_come_out_whole_wherever_the_bytes_are_cut(size: int) -> None:
    events, rest = [], b""
    for at in range(0, len(STREAM), size):
        new, rest = take_events(rest + STREAM[at : at + size])
        events += new
    assert (events, rest) == ([{"text": "café"}, {"text": "", "usage": {}}], b"")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunks_are_put_together_and_end_with_the_empty_line(size: int) -> None:
    reader, body = feed(CHUNKED, size)
    assert (reader.status, body) == (200, b"abcdefghijklmno")
    assert reader.is_done and reader.keeps_alive


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_body_of_a_stated_length_ends_there(size: int) -> None:
    reader, body = feed(PLAIN, size)
    assert (reader.status, reader.headers["retry-after"], body) == (429, "2", b"abc")
    assert reader.is_done and reader.keeps_alive


def test_body_without_a_length_ends_with_the_connection() -> None:
    reader, body = feed(ENDLESS, 4)
    assert (body, reader.is_done) == (b"abc", False)
    reader.end()
    assert reader.is_done and not reader.keeps_alive


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200", CHUNKED[:-2], PLAIN[:-1]])
def test_end_in_the_middle_is_said(data: bytes) -> None:
    reader, _ = feed(data, 1000)
    with pytest.raises(BadAnswer, match="before the answer did"):
        reader.end()


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n\r\n", CHUNKED.replace(b"\r\n4\r", b"\r\n?\r")])
def test_what_is_no_http_is_said(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        ResponseReader().feed(data)
