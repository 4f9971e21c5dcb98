"""The set of library versions that exports were tested with; another is refused before any work.

The exporters reach into transformers' internals, so a version outside the range does not fail
cleanly: it fails in the middle, or writes a graph with odd inputs.
"""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from .errors import QuantizeError

# distribution -> (first good version, first that is not known to be good)
GOOD = {
    "transformers": ("4.57.0", "4.58"),
    "optimum": ("2.1.0", "2.2"),
    "optimum-onnx": ("0.1.0", "0.2"),
    "onnx": ("1.23.0", "1.24"),
    "onnxruntime": ("1.26.0", "1.27"),
    "onnxruntime-genai": ("0.14.1", "0.15"),
}
# Both wheels own the import name `onnxruntime`.
_GPU_WHEEL = "onnxruntime-gpu"


def check_versions() -> str:
    """The set in use, in one line. Raises QuantizeError if a library is missing or out of range."""
    found = dict(_find(name) for name in GOOD)
    return "versions: " + ", ".join(f"{name} {version}" for name, version in found.items())


def _find(name: str) -> tuple[str, str]:
    """The distribution that is installed under `name`, and its version."""
    first, beyond = GOOD[name]
    wanted = f"{name} >={first},<{beyond}"
    installed = [n for n in _candidates(name) if _version(n)]
    if not installed:
        raise QuantizeError(f"{name} is not installed; {wanted} is needed (`make setup`)")
    if len(installed) > 1:
        raise QuantizeError(f"{' and '.join(installed)} are both installed: keep one of them")
    version = _version(installed[0])
    if not Version(first) <= Version(version) < Version(beyond):
        raise QuantizeError(
            f"{installed[0]} {version} is not one of the versions that exports were tested with: "
            f"{wanted} is needed (`make setup` installs the tested set)"
        )
    return installed[0], version


def _candidates(name: str) -> list[str]:
    return [name, _GPU_WHEEL] if name == "onnxruntime" else [name]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
