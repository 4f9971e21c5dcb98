"""A JSON file that holds an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import QuantizeError


def read_json(path: Path) -> dict[str, Any]:
    """Raises QuantizeError, naming the file, if it holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QuantizeError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8 is one, too
        raise QuantizeError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise QuantizeError(f"{path} is not a JSON object")
    return content
