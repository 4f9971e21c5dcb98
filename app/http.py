"""HTTP as the routes see it: a request's body, id and time in; JSON or a stream of events out."""

from __future__ import annotations

import itertools
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from flask import Response, g, request
from pydantic import BaseModel

from . import direct
from .access import NOTE
from .departure import ENVIRON_KEY, Departure
from .direct import Outlet, Regular
from .errors import InvalidRequest, PayloadTooLarge, UnreadableBody, UnsupportedMediaType
from .limits import deadline
from .off_hub import Waiter
from .protocol import parse
from .replies import guarded, keep_alive, num_made, summary
from .served import Ask, Served
from .service import Service
from .traced import TRACED, Traced

if TYPE_CHECKING:
    from .answer import Answer
    from .completion import Delta
    from .config import Settings
    from .replies import Indexed

M = TypeVar("M", bound=BaseModel)

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the stream back
}
KEEP_ALIVE_SECONDS = 5.0
_regular = Regular()
REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")


def begin_request() -> None:
    """Stamps the request with its arrival and its id: the client's X-Request-Id, or a new one.

    Raises InvalidRequest for an id that could not be written in a log or a header as it is.
    """
    g.arrived_at = time.monotonic()
    g.request_id = uuid.uuid4().hex
    g.departure = request.environ.get(ENVIRON_KEY) or Departure()
    given = request.headers.get("X-Request-Id")
    if given is None:
        return
    if not REQUEST_ID.fullmatch(given):
        raise InvalidRequest(
            "X-Request-Id: it must be 1 to 128 letters, digits and . _ ~ : / + = @ -",
            param="X-Request-Id",
        )
    g.request_id = given


def take(service: Service) -> Served:
    """The model that this request is answered by, to its end, whatever the server switches to."""
    g.served = served = service.current
    served.num_requests += 1
    return served


def give_back(_: object = None) -> None:
    """Behind the view, however it ended: only what it has submitted still needs the model."""
    if (served := g.pop("served", None)) is not None:
        served.num_requests -= 1


def read_request(model: type[M], settings: Settings) -> M:
    """The body as a valid `model`; from then on its client is watched. Raises InvalidRequest,
    ClientLeft and what `_read_body` raises."""
    body = _read_body(settings.max_body_bytes)
    g.departure.watch()
    g.departure.check()
    asked = parse(model, body, settings.max_json_depth)
    if (traced := _traced()) is not None:
        traced.model = getattr(asked, "model", None)
        traced.is_stream = bool(getattr(asked, "stream", None))
    return asked


def read_deadline(timeout_ms: int | None, settings: Settings) -> float | None:
    """When the request's time is over, of `time.monotonic`; None for never."""
    header = request.headers.get("X-Request-Timeout")
    return deadline(timeout_ms, header, settings.max_timeout_ms, g.arrived_at)


def owner() -> str:
    """Whose request this is: the name of its API key."""
    return str(g.get("owner", ""))


def waiter(deadline_at: float | None) -> Waiter:
    """This request, as it waits for work off the hub."""
    return Waiter(g.departure, owner(), deadline_at)


def ask(prompts: list[list[int]], deadline_at: float | None, **fields: Any) -> Ask:
    """The rest of what this request asks for; `fields` are those of `Ask`."""
    return Ask(
        *(g.request_id, g.arrived_at, g.departure, prompts),
        owner=owner(),
        deadline_at=deadline_at,
        **fields,
    )


def json_response(fields: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(fields) + b"\n", status, content_type="application/json")


def send_whole(answer: Answer, frame: Callable[[Iterable[Indexed]], dict[str, Any]]) -> Response:
    _enter(answer)
    try:
        return json_response(frame(answer))
    finally:
        answer.abort()  # nothing to do but after a failure
        g.departure.forget()
        _tell(answer)


def send_stream(
    answer: Answer,
    frame: Callable[[Iterable[Indexed]], Iterator[bytes]],
    frame_running: Callable[[int, Delta], bytes],
    count: Callable[[str], None],
) -> Response:
    """The status goes out with the first delta, framed, or after `KEEP_ALIVE_SECONDS` with a
    comment: a failure until then is a real one. One behind it is an event, and `count` hears its
    code. Deltas between the first and a choice's last are framed by `frame_running`, which agrees
    with `frame`, and written directly where the client's socket is known."""
    outlet: Outlet | None = request.environ.get(direct.ENVIRON_KEY)
    if outlet is not None:
        answer.write_to(outlet, frame_running)
    _enter(answer)
    try:
        if answer.begins(KEEP_ALIVE_SECONDS):
            deltas = iter(answer)
            frames = frame(itertools.chain([next(deltas)], deltas))
            frames = itertools.chain([next(frames)], frames)
        else:
            frames = _begun_with_comments(answer, frame, outlet)
        if outlet is not None:
            frames = _kept_alive(answer, frames, outlet)
    except BaseException:
        answer.abort()
        _tell(answer)
        raise
    noted = request.environ.setdefault(NOTE, {})

    def hear(code: str) -> None:
        noted["error"] = code
        count(code)

    response = Response(guarded(answer, frames, hear), headers=_SSE_HEADERS)

    def end() -> None:  # also if nothing of it was ever asked for
        answer.abort()
        noted.update(summary(answer))

    response.call_on_close(end)
    return response


def _begun_with_comments(
    answer: Answer, frame: Callable[[Iterable[Indexed]], Iterator[bytes]], outlet: Outlet | None
) -> Iterator[bytes]:
    """Proxies and clients end a stream that says nothing."""
    yield keep_alive(answer)
    while outlet is None and not answer.begins(KEEP_ALIVE_SECONDS):
        yield keep_alive(answer)
    yield from frame(answer)


def _kept_alive(answer: Answer, frames: Iterator[bytes], outlet: Outlet) -> Iterator[bytes]:
    """Its frames, and comments past them, to the last one, whenever it has said nothing for a
    while: it may wait, read its prompt, or hold back what it has."""
    num_sent = 0

    def remark() -> None:
        nonlocal num_sent
        if outlet.num_sent == num_sent:
            answer.remark(keep_alive(answer))
        num_sent = outlet.num_sent

    with _regular.calling(remark, KEEP_ALIVE_SECONDS):
        yield from frames


def note(**fields: Any) -> None:
    """What the access log shall say of this request."""
    request.environ.setdefault(NOTE, {}).update(fields)


def _enter(answer: Answer) -> None:
    """Charges its tokens to the key that asks, if there is one, and lets a span be made of it, if
    there are any."""
    if (lease := g.get("lease")) is not None:
        lease.meter(lambda: num_made(answer))
    if (traced := _traced()) is not None:
        traced.answer, traced.served_model = answer, g.served.model_names[0]


def _traced() -> Traced | None:
    traced: Traced | None = request.environ.get(TRACED)
    return traced


def _tell(answer: Answer) -> None:
    note(**summary(answer))


def _read_body(limit: int) -> bytes:
    """The body, whole. Raises for another type, one byte over the limit, and broken framing."""
    if request.mimetype != "application/json":
        raise UnsupportedMediaType("the Content-Type must be application/json")
    try:
        # Not through Flask: its limit cuts a chunked body short in silence.
        body: bytes = request.environ["wsgi.input"].read(limit + 1)
    except OSError as error:
        raise UnreadableBody(f"the body cannot be read: {error}") from None
    if len(body) > limit:
        raise PayloadTooLarge(f"the body is larger than {limit} bytes (MAX_BODY_BYTES)")
    if not body:
        raise InvalidRequest("the body is empty; a JSON object is expected")
    return body
