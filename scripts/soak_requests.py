"""What soak.py sends: requests of every kind and length, what each should get, and how its client
leaves. Pure but for `exchange`, which sends one on a socket of its own."""

import json
import math
import random
import socket
import struct
from dataclasses import dataclass
from time import monotonic
from typing import Any

WORDS = ["air", "all", "and", "arm", "art", "ask", "bad", "bag", "bar", "bed", "big", "box"]
WAYS = ("close", "reset", "half-close")
GONE = "gone"  # the status of a request whose client has left before its answer was whole
SHARE_OF_BAD = 0.1
SHARE_OF_LEAVING = 0.25
SHARE_WITH_TIME = 0.08
END_SECONDS = 5.0  # in which a server has to end a connection whose client has half-closed it
_REASONS = {"stop", "length", "timeout", "repetition"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Served:
    """What the server's model allows."""

    max_prompt: int  # tokens
    max_answer: int
    num_ids: int
    tokens_per_word: float
    has_chat: bool
    has_grammar: bool


@dataclass(frozen=True)
class Request:
    id: str
    sent: bytes
    statuses: frozenset[int]  # that are right
    path: str = ""
    num_choices: int = 0  # that the engine gets; 0: it is to be refused
    stream: bool = False
    leaves: str = ""  # one of WAYS, or not at all
    leaves_after: float = 0.0  # seconds
    prompt_tokens: int | None = None
    completion_tokens: int | None = None  # exactly, if it ends with "length" only
    stop: str = ""
    is_json: bool = False
    with_usage: bool = True


@dataclass(frozen=True)
class Result:
    """One request as its client saw it. `error` says what was wrong with the answer."""

    request: Request
    status: int | str
    seconds: float
    error: str = ""
    code: str = ""  # of an error object
    reasons: tuple[str, ...] = ()  # of each choice
    completion_tokens: int = 0


def make_request(dice: random.Random, served: Served, id_: str) -> Request:
    if dice.random() < SHARE_OF_BAD:
        return _bad(dice, id_)
    kinds = ["generate", "completions", "completions"] + ["chat"] * served.has_chat
    kind = dice.choice(kinds)
    body: dict[str, Any] = {}
    expected: dict[str, Any] = {"num_choices": 1, "statuses": frozenset({200, 429, 503})}
    num_prompt = _length(dice, served.max_prompt)
    num_answer = _short_length(dice, served.max_answer)
    body["max_tokens"] = num_answer
    if kind == "completions" and dice.random() < 0.5:
        body["prompt"] = [dice.randrange(served.num_ids) for _ in range(num_prompt)]
        expected["prompt_tokens"] = num_prompt
    else:
        text = _text(dice, num_prompt, served.tokens_per_word)
        messages = [{"role": "user", "content": text}]
        body |= {"messages": messages} if kind == "chat" else {"prompt": text}
    body["temperature"] = dice.choice([0, 0.7, 1])
    if dice.random() < 0.15:
        body["n"] = expected["num_choices"] = dice.randrange(2, 4)
    if kind == "generate" and dice.random() < 0.5:
        body["ignore_eos"] = True
        expected["completion_tokens"] = num_answer * expected["num_choices"]
    elif dice.random() < 0.2:
        body["stop"] = expected["stop"] = dice.choice(["e", " the", "\n"])
    elif served.has_grammar and kind != "completions" and dice.random() < 0.2:
        schema = {"name": "it", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        expected["is_json"] = True
    if dice.random() < 0.15:
        body |= {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}
    if dice.random() < 0.5:
        body["stream"] = expected["stream"] = True
        if kind != "generate":
            expected["with_usage"] = dice.random() < 0.7
            if expected["with_usage"]:
                body["stream_options"] = {"include_usage": True}
    if dice.random() < SHARE_WITH_TIME:
        body["timeout_ms"] = int(math.exp(dice.uniform(math.log(20), math.log(5000))))
        expected["statuses"] |= {504}
        expected.pop("completion_tokens", None)
    if dice.random() < SHARE_OF_LEAVING:
        expected["leaves"] = dice.choice(WAYS)
        expected["leaves_after"] = 10 ** dice.uniform(-2.5, 1.3)
    path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}.get(kind, "/generate")
    return Request(id_, _post(path, body, id_), path=path, **expected)


def longest(served: Served, id_: str) -> Request:
    """As long as they get: many of them at once fill the cache."""
    words = " ".join(["all"] * int(served.max_prompt / served.tokens_per_word))
    body = {"prompt": words, "max_tokens": served.max_answer, "ignore_eos": True}
    return Request(
        id_,
        _post("/generate", body, id_),
        frozenset({200}),
        path="/generate",
        num_choices=1,
        completion_tokens=served.max_answer,
    )


def _bad(dice: random.Random, id_: str) -> Request:
    """Refused by the app, or by the socket side."""
    bodies: list[tuple[str, Any, int]] = [
        ("/generate", {"prompt": "a", "max_tokens": 0}, 400),
        ("/generate", {"prompt": "a", "max_token": 3}, 400),
        ("/generate", {"prompt": ""}, 400),
        ("/generate", {"prompt": "a", "n": 1000}, 400),
        ("/v1/completions", {"prompt": [-1], "max_tokens": 3}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**9}, 400),
        ("/v1/completions", {"prompt": "a", "model": "no such model"}, 404),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": "a"}]}, 400),
        ("/nowhere", {}, 404),
    ]
    if dice.random() < 0.6:
        path, body, status = dice.choice(bodies)
        return Request(id_, _post(path, body, id_), frozenset({status}), path=path)
    right = _post("/generate", {"prompt": "a"}, id_)
    sent, status = dice.choice(
        [
            (right.replace(b"application/json", b"text/plain"), 415),
            (right.replace(b"Content-Length:", b"Content-Length: 5\r\nContent-Length:"), 400),
            (right.replace(b'{"', b'{{"'), 400),
            (right.replace(b"Host: soak\r\n", b""), 400),
            (right.replace(b"POST /generate", b"DELETE /generate"), 405),
            (b"\0\1\2 not HTTP\r\n\r\n", 400),
        ]
    )
    return Request(id_, sent, frozenset({status}), path="bad")


def _length(dice: random.Random, most: int) -> int:
    """Half of them any length, half of them mostly short."""
    return dice.randint(1, most) if dice.random() < 0.5 else _short_length(dice, most)


def _short_length(dice: random.Random, most: int) -> int:
    return int(math.exp(dice.uniform(0, math.log(most + 0.999))))


def _text(dice: random.Random, num_tokens: int, tokens_per_word: float) -> str:
    return " ".join(dice.choices(WORDS, k=max(1, int(num_tokens / tokens_per_word))))


def _post(path: str, body: dict[str, Any], id_: str) -> bytes:
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {id_}\r\nConnection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def exchange(address: tuple[str, int], request: Request, patience: float) -> Result:
    """Sends it, and reads or leaves."""
    began_at = monotonic()
    received, has_left, error = b"", False, ""
    try:
        with socket.create_connection(address, timeout=patience) as connection:
            connection.sendall(request.sent)
            received, has_left = _read(connection, request, began_at, patience)
    except OSError as failure:
        error = f"{type(failure).__name__} behind {len(received)} bytes"
    seconds = monotonic() - began_at
    if error and not (has_left or request.leaves):
        return Result(request, "broken", seconds, error)
    if has_left or error:
        return Result(request, GONE, seconds)
    return judge(request, received, seconds)


def _read(
    connection: socket.socket, request: Request, began_at: float, patience: float
) -> tuple[bytes, bool]:
    """What came until the end, and whether the client has left before that."""
    received = b""
    leaves_at = began_at + (request.leaves_after if request.leaves else patience)
    while True:
        connection.settimeout(max(0.001, leaves_at - monotonic()))
        try:
            data = connection.recv(65536)
        except TimeoutError:
            if not request.leaves:
                raise
            break
        if not data:
            return received, False
        received += data
    if request.leaves == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif request.leaves == "half-close":
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(END_SECONDS)
        while connection.recv(65536):
            pass
    return received, True


def judge(request: Request, received: bytes, seconds: float) -> Result:
    """An answer to its end: is it whole, and what was to be expected?"""
    try:
        status, is_stream, body = split(received)
    except ValueError as error:
        return Result(request, "broken", seconds, f"{error}: {received[-80:]!r}")
    try:
        if status != 200:
            code = json.loads(body)["error"]["code"]
            is_right = status in request.statuses
            return Result(request, status, seconds, "" if is_right else f"{code} ({status})", code)
        if status not in request.statuses:
            return Result(request, status, seconds, "answered, but should be refused")
        return _judge_answer(request, _events(body) if is_stream else [json.loads(body)], seconds)
    except (ValueError, KeyError, IndexError) as error:
        told = f"{type(error).__name__} {error} in {body[-120:]!r}"
        return Result(request, status, seconds, told)


def split(received: bytes) -> tuple[int, bool, bytes]:
    """Status, is it a stream of events, and body. Raises ValueError unless it is whole."""
    head, separator, body = received.partition(b"\r\n\r\n")
    if not separator:
        raise ValueError("no whole head")
    lines = head.lower().split(b"\r\n")
    fields = dict(line.split(b": ", 1) for line in lines[1:])
    if fields.get(b"transfer-encoding") == b"chunked":
        body = _from_chunks(body)
    elif len(body) != int(fields[b"content-length"]):
        raise ValueError("cut short")
    is_stream = fields.get(b"content-type", b"").startswith(b"text/event-stream")
    return int(lines[0].split()[1]), is_stream, body


def _from_chunks(rest: bytes) -> bytes:
    body = b""
    while True:
        size, separator, rest = rest.partition(b"\r\n")
        if not separator:
            raise ValueError("no last chunk")
        if int(size, 16) == 0:
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


def _events(body: bytes) -> list[Any]:
    """Of a stream; the end mark as a string."""
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


def _judge_answer(request: Request, events: list[Any], seconds: float) -> Result:
    """`events` is one, the answer, if it was not streamed."""
    is_ours = request.path == "/generate"
    if request.stream and not is_ours and events[-1:] == ["[DONE]"]:
        events.pop()
    elif request.stream and not is_ours and "error" not in events[-1]:
        raise ValueError("no [DONE]")
    if "error" in events[-1]:
        code = events[-1]["error"]["code"]
        is_late = code == "deadline_exceeded" and 504 in request.statuses  # behind a keep-alive
        return Result(request, 200, seconds, "" if is_late else f"{code} in its stream", code)
    texts, reasons = _choices(request, events)
    usage = events[-1].get("usage") if request.with_usage else None
    wrong = list(_wrong(request, texts, reasons, usage))
    num_tokens = usage["completion_tokens"] if usage else 0
    return Result(request, 200, seconds, "; ".join(wrong), "", tuple(reasons), num_tokens)


def _choices(request: Request, events: list[Any]) -> tuple[list[str], list[str]]:
    texts = [""] * request.num_choices
    reasons = [""] * request.num_choices
    for event in events:
        for choice in event.get("choices", [event]):
            index = choice.get("index", 0)
            message = choice.get("message") or choice.get("delta") or {}
            texts[index] += choice.get("text") or message.get("content") or ""
            if choice.get("finish_reason"):
                if reasons[index]:
                    raise ValueError(f"choice {index} has ended twice")
                reasons[index] = choice["finish_reason"]
    return texts, reasons


def _wrong(
    request: Request, texts: list[str], reasons: list[str], usage: dict[str, int] | None
) -> Any:
    if not all(reason in _REASONS for reason in reasons):
        yield f"finish reasons {reasons}"
    if "timeout" in reasons and 504 not in request.statuses:
        yield "a timeout that nobody asked for"
    if request.stop and any(request.stop in text for text in texts):
        yield "a stop string in the text"
    if request.is_json:
        for text, reason in zip(texts, reasons, strict=True):
            if reason == "stop" and json.loads(text).keys() != {"name", "old"}:
                yield "not the schema's JSON"
    if usage is None:
        if request.with_usage:
            yield "no usage"
        return
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        yield f"usage {usage}"
    if request.prompt_tokens not in (None, usage["prompt_tokens"]):
        yield f"{usage['prompt_tokens']} prompt tokens, not {request.prompt_tokens}"
    if request.completion_tokens not in (None, usage["completion_tokens"]):
        yield f"{usage['completion_tokens']} tokens, not {request.completion_tokens}"
