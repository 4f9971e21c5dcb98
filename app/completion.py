"""One request's answer as it grows: token ids in, text deltas out.

Plain and streamed answers both come through here, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import ModelFailure, NotReady
from .sequence import FinishReason, Sequence

if TYPE_CHECKING:
    from .bridge import TokenStream
    from .text import Detokenizer  # brings transformers, which the hub does not wait for


_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that can be sent, and on the last delta why the answer ends."""

    text: str
    finish_reason: FinishReason | None


class Completion:
    """Iterate once: yields deltas, the last one with a finish reason.

    Raises ModelFailure if the engine fails, NotReady if the server stops.
    """

    def __init__(self, stream: TokenStream, detokenizer: Detokenizer) -> None:
        self.sequence: Sequence = stream.sequence
        self._stream = stream
        self._detokenizer = detokenizer

    def __iter__(self) -> Iterator[Delta]:
        for advances in self._stream:
            last = advances[-1]
            reason = last.finish_reason
            ids = [advance.token_id for advance in advances if advance.token_id is not None]
            if reason is FinishReason.STOP:
                ids.pop()  # the EOS itself is no text
            is_complete = reason in _COMPLETE
            text = self._detokenizer.feed(ids, is_last=is_complete)
            if text or is_complete:
                yield Delta(text, reason if is_complete else None)
            if reason is FinishReason.ERROR:
                raise ModelFailure(last.error or "the model run failed")
            if reason is FinishReason.ABORT:  # not by this client, which is still here
                raise NotReady(last.error or "the request was aborted")

    def abort(self) -> None:
        """The client has gone; nothing happens if the answer is complete."""
        if not self.sequence.is_finished:
            self._stream.abort()
