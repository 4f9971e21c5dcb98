"""Speed and memory of a graph, in a process of its own: `python -m quantize.speed FOLDER TOKENS`.

A process of its own, because peak memory is a property of the process. Prints one JSON object.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from .decoding import Decoding
from .errors import QuantizeError

_STEPS = 48
_PREFILLS = 4


def measure(folder: Path, num_tokens: int) -> dict[str, float]:
    """Tokens/s of a prefill of `num_tokens` and of decoding 1 and 16 rows with half as many in the
    cache, medians.

    Memory in bytes, with one session at a time: `model_memory_bytes` is what loading the graph and
    reading a prompt added at most, `peak_memory_bytes` the largest resident size of the process.
    """
    before = _memory("VmRSS")
    prefill = _prefill_rate(folder, num_tokens)
    return {
        "model_memory_bytes": _memory("VmHWM") - before,
        "prefill_tokens_per_second": prefill,
        "decode_1_tokens_per_second": _decode_rate(folder, num_tokens, rows=1),
        "decode_16_tokens_per_second": _decode_rate(folder, num_tokens, rows=16),
        "peak_memory_bytes": _memory("VmHWM"),
    }


def _prefill_rate(folder: Path, num_tokens: int) -> float:
    decoding = Decoding(folder, 1, num_tokens)
    prompt = np.ones((1, num_tokens), np.int64)
    seconds = []
    for _ in range(_PREFILLS):
        decoding.restart()
        seconds.append(_timed(decoding, prompt))
    return round(num_tokens / statistics.median(seconds), 1)


def _decode_rate(folder: Path, num_tokens: int, rows: int) -> float:
    decoding = Decoding(folder, rows, num_tokens)
    num_cached = num_tokens // 2
    decoding.feed(np.ones((rows, num_cached), np.int64))
    num_steps = min(_STEPS, num_tokens - num_cached)
    seconds = [_timed(decoding, np.ones((rows, 1), np.int64)) for _ in range(num_steps)]
    return round(rows / statistics.median(seconds), 1)


def _memory(field: str) -> int:
    """Bytes, from Linux's own file: `ru_maxrss` of a child begins with the peak of the process that
    started it."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def _timed(decoding: Decoding, ids: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> float:
    started_at = time.perf_counter()
    decoding.feed(ids)
    return time.perf_counter() - started_at


def measure_in_turns(
    folders: dict[str, Path], num_tokens: int, repeats: int = 2
) -> dict[str, dict[str, float]]:
    """`measure` of each folder in its own process, in turns; medians over the repeats."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for _ in range(repeats):
        for name, folder in folders.items():
            command = [sys.executable, "-m", "quantize.speed", str(folder.resolve())]
            command.append(str(num_tokens))
            # The package may not be installed: it is found where this one was.
            root = Path(__file__).parents[1]
            run = subprocess.run(command, cwd=root, capture_output=True, text=True)
            if run.returncode:
                raise QuantizeError(
                    f"the measuring process ended with {run.returncode}: {run.stderr[-400:]}"
                )
            runs[name].append(json.loads(run.stdout))
    return {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for name, found in runs.items()
    }


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
