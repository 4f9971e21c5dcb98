"""An answer that goes round in circles: how often its end is the same n-gram, in a row.

Pure, and cheap enough for every token: all that is kept is, for each distance up to `MAX_NGRAM`,
how many of the last tokens equal the one that far before them.
"""

from __future__ import annotations

MAX_NGRAM = 32

Runs = list[int]  # runs[n - 1] of the last tokens equal the token n places before


def extend_runs(runs: Runs, token_ids: list[int]) -> Runs:
    """The runs of `token_ids`, from those without its last token ([] for the first)."""
    last = token_ids[-1]
    reach = min(len(token_ids) - 1, MAX_NGRAM)
    # The distance that the new token is the first to reach has no run yet.
    before = [*runs, 0][:reach]
    return [run + 1 if token_ids[-1 - n] == last else 0 for n, run in enumerate(before, 1)]


def num_repeats(runs: Runs) -> int:
    """How often in a row the same n-gram stands at the end: of n = 1..`MAX_NGRAM` the most."""
    return max((run // n + 1 for n, run in enumerate(runs, 1)), default=1)
