"""Python's collector of cycles, kept away from what is loaded and stays (DESIGN 6); and what a
model that is dropped gives back to the system.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

# A collection takes the GIL from hub and engine. Answers leave next to no cycles behind.
_THRESHOLDS = (10_000, 20, 50)


def freeze() -> None:
    """What there is now is kept out of every later collection, and those come seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def return_memory() -> None:
    """What only a dropped model used goes back to the system. On the hub, which stands still."""
    gc.unfreeze()  # cycles in what the load has frozen would stay for ever
    freeze()
    with suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)
