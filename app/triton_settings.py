"""Settings of a Triton model: `parameters` of its config.pbtxt, by the names of our variables.

Those that are about sockets, keys and shutting down are Triton's own business, and refused here.
What is not given there comes from the environment, then from the defaults.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from .config import OPTIONS, Settings, read_settings
from .errors import WrongSetting

_USED = frozenset(
    [
        *("MODEL_PATH", "DEVICE", "STRICT_PRECISION", "DETERMINISTIC", "THREADS"),
        *("MAX_BATCH_SIZE", "MAX_MODEL_LEN", "PREFILL_CHUNK", "PREFILL_STALL", "PREFIX_CACHE"),
        *("KV_MEMORY_SHARE", "KV_IDLE_SECONDS", "MAX_GPU_MEMORY_BYTES"),
        *("MAX_QUEUED_REQUESTS", "MAX_QUEUED_TOKENS", "SATURATION_WAIT_SECONDS"),
        *("MAX_TIMEOUT_MS", "MAX_STEP_SECONDS", "MAX_LOAD_SECONDS", "SLOW_STEP_MS"),
        *("LOG_LEVEL", "LOG_FORMAT"),
    ]
)
_TRITONS = frozenset(["EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"])  # the backend's own
_MODEL = "model"  # beside model.py


def read_parameters(args: dict[str, str]) -> Settings:
    """Of `initialize`'s arguments. A MODEL_PATH that is not absolute is within the version's
    folder. Raises WrongSetting."""
    parameters = json.loads(args["model_config"]).get("parameters") or {}
    given = {name: each["string_value"] for name, each in parameters.items()}
    if unknown := given.keys() - _USED - _TRITONS:
        raise WrongSetting(
            f"parameters: {min(unknown)} is not a setting of a Triton model; they are "
            f"{', '.join(sorted(_USED))}"
        )
    folder = Path(args["model_repository"]) / args["model_version"]
    given["MODEL_PATH"] = str(folder / given.get("MODEL_PATH", _MODEL))
    flags = {
        str(option.envvar): option.opts[0] for option in OPTIONS if isinstance(option, click.Option)
    }
    arguments = [part for name in given.keys() & _USED for part in (flags[name], given[name])]
    try:
        return read_settings(arguments)
    except SystemExit:  # the log has click's message
        raise WrongSetting("a parameter of the model's config.pbtxt is wrong: see above") from None
