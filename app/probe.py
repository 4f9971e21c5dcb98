"""Does the folder's graph compute here what it computed where it was built?

int8 kernels differ from CPU to CPU, and some saturate: pairs of u8 x s8 products overflow 16 bits
on AVX2 without VNNI (onnxruntime#6004, #6732). Text comes out all the same, only wrong, so a folder
may carry logits of its own graph, and they are compared before the first request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import UnservableModel
from .machine import cpu_features
from .record import Probe
from .sequence import PrefillChunk, SamplingParams, Sequence, StepPlan

if TYPE_CHECKING:
    from .engine import Model
    from .kv_cache import KVCache


def check_probe(probe: Probe, model: Model, vocab_size: int, cache: KVCache) -> None:
    """Reads the probe's prompt into row 0 of `cache`, in one run as where it was built.

    Raises UnservableModel if a logit is further off than the probe allows, or is not finite.
    """
    largest = max(*probe.token_ids, *probe.top_ids)
    if largest >= vocab_size:
        raise UnservableModel(
            f"the probe in quantization.json names token {largest}, and the graph has {vocab_size}:"
            " they do not belong together"
        )
    sequence = Sequence("probe", probe.token_ids, SamplingParams(max_tokens=1))
    plan = StepPlan([], PrefillChunk(sequence, 0, 0, probe.token_ids), [])
    found = model.forward(plan, cache)[0, probe.top_ids].astype(np.float64)
    difference = np.abs(found - probe.top_logits)
    difference[np.isnan(difference)] = np.inf
    worst = int(difference.argmax())
    if difference[worst] > probe.max_difference:
        raise UnservableModel(_report(probe, worst, float(found[worst])))


def _report(probe: Probe, worst: int, found: float) -> str:
    features = ", ".join(cpu_features()) or "none of those looked for"
    return (
        "the graph computes other numbers on this machine than where it was built: the logit of "
        f"token {probe.top_ids[worst]} is {found:.4g} instead of {probe.top_logits[worst]:.4g} (it "
        f"may differ by {probe.max_difference:.4g}). CPU features here: {features}. Build the "
        "folder on this machine, or with `python -m quantize ... --reduce-range`; if it was built "
        "here, its files are damaged"
    )
