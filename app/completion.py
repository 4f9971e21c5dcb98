"""One request's answer as it grows: deltas of token ids in, pieces of text out.

Plain and streamed answers both come through here, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import ModelFailure
from .sequence import FinishReason, Sequence

if TYPE_CHECKING:
    from .bridge import TokenStream
    from .text import Detokenizer  # brings transformers, which the hub does not wait for


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that can be sent, and on the last piece why the answer ends."""

    text: str
    finish_reason: FinishReason | None


class Completion:
    """Iterate once: yields pieces, the last one with a finish reason.

    Raises ModelFailure if the engine fails.
    """

    def __init__(self, stream: TokenStream, detokenizer: Detokenizer) -> None:
        self.sequence: Sequence = stream.sequence
        self._stream = stream
        self._detokenizer = detokenizer

    def __iter__(self) -> Iterator[Piece]:
        for deltas in self._stream:
            last = deltas[-1]
            ids = [delta.token_id for delta in deltas if delta.token_id is not None]
            if last.finish_reason is FinishReason.STOP:
                ids.pop()  # the EOS itself is no text
            has_failed = last.finish_reason is FinishReason.ERROR
            is_last = last.finish_reason is not None and not has_failed
            text = self._detokenizer.feed(ids, is_last=is_last)
            if text or is_last:
                yield Piece(text, last.finish_reason if is_last else None)
            if has_failed:
                raise ModelFailure(last.error or "the model run failed")

    def abort(self) -> None:
        """The client has gone; nothing happens if the answer is complete."""
        if not self.sequence.is_finished:
            self._stream.abort()
