"""One request of Triton's and its answer: what a step brought becomes responses of its sender.

Every path ends in one response, or error, with the final flag: without it Triton keeps the request,
its memory and its client for ever. Belongs to the thread that delivers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .completion import Completion, Delta
from .errors import ClientLeft, DeadlineExceeded, ServeError
from .sequence import Advance, FinishReason, Sequence

if TYPE_CHECKING:
    from .backlog import Place

log = logging.getLogger(__name__)

# Triton's error for an HTTP status; INTERNAL for the rest.
_CODES = {
    400: "INVALID_ARG",
    404: "NOT_FOUND",
    499: "CANCELLED",
    **dict.fromkeys((429, 503, 504), "UNAVAILABLE"),
}


class Arrivals:
    """A sequence's advances, until its completion takes them."""

    def __init__(self, sequence: Sequence, on_end: Callable[[Sequence], None]) -> None:
        self.sequence = sequence
        self.passage: Callable[[Advance], None] | None = None  # for what `Completion` asks of one
        self._arrived: list[Advance] = []
        self._on_end = on_end

    def put(self, advance: Advance) -> None:
        self._arrived.append(advance)

    def take(self) -> list[Advance]:
        advances, self._arrived = self._arrived, []
        return advances

    def end(self, reason: FinishReason) -> None:
        if not self.sequence.is_finished and self.sequence.ended_by is None:
            self.sequence.ended_by = reason
            self._on_end(self.sequence)

    def place(self) -> Place | None:
        return None


class Responses:
    """Of one request: what its sender is given, in Triton's form. Thread-safe.

    A sender that is asked anything behind its final flag takes the whole of Triton down with it
    (2.51: a segmentation fault in ResponseFactoryIsCancelled).
    """

    def __init__(self, pb_utils: Any, sender: Any) -> None:
        self._pb_utils = pb_utils
        self._sender = sender
        self._lock = threading.Lock()
        self._has_ended = False

    @property
    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._has_ended and bool(self._sender.is_cancelled())

    def send(self, *, is_last: bool, **outputs: str | int) -> None:
        """Each output is one value of a batch of one."""
        tensors = [self._pb_utils.Tensor(name, _array(value)) for name, value in outputs.items()]
        self._send(self._pb_utils.InferenceResponse(tensors), is_last)

    def fail(self, error: ServeError) -> None:
        kinds = self._pb_utils.TritonError
        code = getattr(kinds, _CODES.get(error.status, "INTERNAL"))
        told = kinds(error.message, code)
        self._send(self._pb_utils.InferenceResponse(error=told), is_last=True)

    def pass_on(self, response: Any) -> None:
        """One that is whole, and the last."""
        self._send(response, is_last=True)

    def _send(self, response: Any, is_last: bool) -> None:
        final = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        with self._lock:
            if not self._has_ended:
                self._has_ended = is_last
                self._sender.send(response, flags=final if is_last else 0)


class TritonAnswer:
    """`is_streamed`: each text that comes is a response; else the whole is one."""

    def __init__(
        self,
        responses: Responses,
        arrivals: Arrivals,
        completion: Completion,
        *,
        is_streamed: bool,
        deadline_at: float | None,
    ) -> None:
        self.arrivals = arrivals
        self._has_left = False
        self.sequence = completion.sequence
        self.has_ended = False
        self._responses = responses
        self._completion = completion
        self._is_streamed = is_streamed
        self._deadline_at = deadline_at
        self._text = ""

    def go_on(self) -> None:
        """Tells what has come, unless its client has left. Raises what the answer fails with."""
        if self._has_left or self._responses.is_cancelled:
            raise ClientLeft("the request was cancelled")
        is_late = self._deadline_at is not None and time.monotonic() >= self._deadline_at
        delta = self._completion.take()
        if delta is not None:
            self._tell(delta)
        if is_late and not self.has_ended:
            self._expire()

    def leave(self) -> None:
        """Whoever asked has gone, as another request says."""
        self._has_left = True
        self.arrivals.end(FinishReason.ABORT)

    def fail(self, error: ServeError) -> None:
        """The last word, and the sequence's end."""
        self.has_ended = True
        self._completion.abort()
        self._responses.fail(error)

    def _tell(self, delta: Delta) -> None:
        self._text += delta.text
        if delta.finish_reason is not None:
            self.has_ended = True
            self._responses.send(
                is_last=True,
                text_output=self._text,
                finish_reason=str(delta.finish_reason),
                prompt_tokens=len(self.sequence.prompt_ids),
                completion_tokens=self._completion.num_tokens,
            )
        elif self._is_streamed and self._text:
            text, self._text = self._text, ""
            self._responses.send(is_last=False, text_output=text)

    def _expire(self) -> None:
        last = self._completion.expire()
        if not self._completion.num_tokens:
            raise DeadlineExceeded("the request's time was over before its first token")
        self._tell(last)


def _array(value: str | int) -> Any:
    if isinstance(value, str):
        return np.array([[value.encode()]], dtype=object)
    return np.array([[value]], dtype=np.int32)
