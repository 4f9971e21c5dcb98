"""Programs from outside Python that some tests need: Prometheus, a browser."""

from __future__ import annotations

import os
import shutil

import pytest


def needs(name: str) -> str:
    """The path of program `name`. Where it is missing the test is skipped, but in CI it fails."""
    path = shutil.which(name)
    if path is not None:
        return path
    reason = f"the program {name} is not installed (.ci/run names its Debian package)"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
