"""What the answers of all generating routes have in common: usage, timings, log-probabilities, and
how a stream of events ends."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import orjson

from .errors import ClientLeft, ServeError

if TYPE_CHECKING:
    from .answer import Answer
    from .completion import Delta, Token
    from .text import TextCodec

    Indexed = tuple[int, Delta]

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients pass over


def keep_alive(answer: Answer) -> bytes:
    """What a stream says that has nothing to tell yet: while the request waits, its place in the
    queue."""
    place = answer.place()
    if place is None:
        return KEEP_ALIVE
    seconds = max(1, math.ceil(place.seconds))
    return f": queued, position {place.position} of {place.length}, about {seconds} s\n\n".encode()


def usage(answer: Answer) -> dict[str, int]:
    """Tokens of a request: of each prompt once, and of all choices, their end tokens included."""
    prompts = {id(ids): len(ids) for ids in (c.sequence.prompt_ids for c in answer.completions)}
    num_prompt = sum(prompts.values())
    num_output = sum(completion.num_tokens for completion in answer.completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def timings(answer: Answer) -> dict[str, float | None]:
    """Seconds of the request in the queue, until its first token from there, and from that to the
    last; and the rate of the tokens after the first, over all choices."""
    started = [c for c in answer.completions if c.sequence.first_token_at is not None]
    admitted = [c.sequence.admitted_at for c in started if c.sequence.admitted_at is not None]
    first = [c.sequence.first_token_at for c in started if c.sequence.first_token_at is not None]
    last = [c.sequence.last_token_at for c in started if c.sequence.last_token_at is not None]
    if not (admitted and first and last):
        return {}
    decode = max(last) - min(first)
    num_tokens = sum(completion.num_tokens for completion in answer.completions)
    rate = round((num_tokens - 1) / decode, 2) if decode > 0 else None
    return {
        "queue_seconds": round(min(admitted) - answer.completions[0].sequence.arrived_at, 6),
        "prefill_seconds": round(min(first) - min(admitted), 6),
        "decode_seconds": round(decode, 6),
        "tokens_per_second": rate,
    }


def summary(answer: Answer) -> dict[str, Any]:
    """What the access log says of it. Several choices may end for several reasons."""
    reasons = dict.fromkeys(str(c.finish_reason) for c in answer.completions if c.finish_reason)
    return {
        **{name: count for name, count in usage(answer).items() if name != "total_tokens"},
        "finish_reason": ",".join(reasons) or None,
        **timings(answer),
    }


def logprobs(tokens: Iterable[Token], codec: TextCodec) -> list[orjson.Fragment]:
    """OpenAI's list of tokens, each with the likeliest in its place.

    As JSON already: an answer's worth of objects would take ten times the memory, and its turn to
    be written would stall the hub.
    """
    return [orjson.Fragment(orjson.dumps(_entry(token, codec))) for token in tokens]


def _entry(token: Token, codec: TextCodec) -> dict[str, Any]:
    top = [_token_object(id_, logprob, codec) for id_, logprob in token.logprobs.top]
    return _token_object(token.id, token.logprobs.logprob, codec) | {"top_logprobs": top}


def _token_object(id_: int, logprob: float, codec: TextCodec) -> dict[str, Any]:
    """A token, as OpenAI's log-probabilities show it, and its id."""
    spelled = codec.spell(id_)
    return {
        "id": id_,
        "token": spelled.decode("utf-8", "replace"),
        "logprob": logprob,
        "bytes": list(spelled),
    }


def event(fields: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def guarded(
    answer: Answer, frames: Iterator[bytes], count: Callable[[str], None]
) -> Iterator[bytes]:
    """A stream's frames, and one error event if they fail: the status has been sent by then.

    `count` hears the error's code. However it ends, also when the client has left, no choice runs
    on.
    """
    try:
        yield from frames
    except ClientLeft:
        pass  # the access log tells it
    except Exception as error:
        told = _foreseen(answer, error) if isinstance(error, ServeError) else _unforeseen(answer)
        count(told.code)
        yield event(told.body())
    finally:
        answer.abort()


def _foreseen(answer: Answer, error: ServeError) -> ServeError:
    log.warning("request %s failed in mid-stream: %s", answer.request_id, error.code)
    return error


def _unforeseen(answer: Answer) -> ServeError:
    log.exception("request %s failed in mid-stream", answer.request_id)
    return ServeError("the server failed on this request")
