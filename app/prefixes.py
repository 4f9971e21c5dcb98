"""Which tokens lie in slots that nobody uses now, and how much of a prompt is among them.

Pure, on arrays of token ids; `slots.py` says where things go. A prefix is shared between requests
of one owner only: the time to the first token would tell an API key what another has sent. All
prefixes of one cache were rotated by the same factors, for a longrope model is served no further
than where they change (`context.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_SHARED = 32  # tokens: fewer are read about as fast as rows are moved
# The last token of a prompt is read for its logits; and a run of one token takes other kernels than
# one of several (the default model's logits differ by up to 0.7), so that a prompt asked again
# could get another answer.
_NUM_READ = 2
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Content:
    """Keys that lie in a slot: those of `ids`, from position 0 on."""

    ids: Ids
    owner: str
    used: int  # larger is later

    def __len__(self) -> int:
        return len(self.ids)


class Found(NamedTuple):
    """The first `num_tokens` of a prompt lie in `slot`, and `num_others` behind them."""

    num_tokens: int
    num_others: int
    slot: int


def as_ids(token_ids: list[int]) -> Ids:
    return np.array(token_ids, np.int32)


def joined(ids: Ids, token_ids: list[int]) -> Ids:
    return np.concatenate([ids, as_ids(token_ids)]) if token_ids else ids


def num_shared(some: Ids, others: Ids) -> int:
    """The length of their longest common prefix."""
    num = min(len(some), len(others))
    differs = some[:num] != others[:num]
    first = int(differs.argmax()) if num else 0
    return first if num and differs[first] else num


def longest(prompt: Ids, places: Iterable[tuple[int, Ids]], min_shared: int) -> Found | None:
    """Where most of the prompt lies, by slot and ids; None below `min_shared` tokens.

    Its last tokens do not count: they are read in any case. Of equals the shortest content, which
    loses least if it is taken over.
    """
    most = len(prompt) - _NUM_READ
    found: Found | None = None
    for slot, ids in places:
        num = min(most, num_shared(prompt, ids))
        one = Found(num, len(ids) - num, slot)
        if num >= min_shared and (found is None or _rank(one) > _rank(found)):
            found = one
    return found


def _rank(found: Found) -> tuple[int, int]:
    return found.num_tokens, -found.num_others
