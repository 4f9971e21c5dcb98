"""Hugging Face ids: the snapshot of a repository, from the hub or from its cache on this machine.

config.json comes first, so that a model that cannot be built costs no download. Only files that a
build needs are taken: no code and no pickled weights. HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and
HF_TOKEN are huggingface_hub's and work as everywhere.
"""

from __future__ import annotations

import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

from .checkpoint import INDEX
from .errors import QuantizeError
from .hf_folder import check_config
from .space import in_units

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHTS = ["model*.safetensors", INDEX]
_FILES = [
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template*"),
    *("additional_chat_templates/*", *_WEIGHTS),
]
_NEVER = ["*.py", "*.bin", "*.pt", "*.pth"]


def is_hub_id(model: str) -> bool:
    return _ID.fullmatch(model) is not None


def fetch(model: str, revision: str | None) -> tuple[Path, str]:
    """The snapshot's folder and its commit; downloaded as far as the cache lacks it.

    Raises QuantizeError if there is no such model, it may not be read, or there is no network.
    """
    folder = _snapshot(model, revision, ["config.json"])
    check_config(folder, _incomplete(model, folder))
    commit = folder.name
    _check_download(model, commit)
    return _snapshot(model, commit, _FILES), commit


def _snapshot(model: str, revision: str | None, files: list[str]) -> Path:
    # Imported here, so that the environment of the run is what it reads.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from requests.exceptions import RequestException

    at = f"{model}" + (f" at revision {revision!r}" if revision else "")
    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=files, ignore_patterns=_NEVER
            )
        )
    except GatedRepoError:
        reason = "is gated: accept its terms on its page, and set HF_TOKEN to a token of yours"
    except RepositoryNotFoundError:
        reason = "is not on the hub, or private (then set HF_TOKEN)"
    except RevisionNotFoundError:
        reason = "does not exist: there is no such branch, tag or commit"
    except LocalEntryNotFoundError:
        reason = "is not in the cache, and the hub cannot be reached (no network, or offline mode)"
    except (HFValidationError, RequestException) as error:
        reason = f"cannot be fetched: {error}"
    raise QuantizeError(
        f"no model at {model!r}: no such folder is here, and as a Hugging Face id, {at} {reason}"
    ) from None


def _incomplete(model: str, folder: Path) -> str:
    return f"{model} has no config.json, or its snapshot in the cache ({folder.name}) is not whole"


def _check_download(model: str, commit: str) -> None:
    """Refuses a repository without safetensors, and one that the cache's disk cannot hold."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from requests.exceptions import RequestException

    try:
        info = HfApi().model_info(model, revision=commit, files_metadata=True)
    except (HfHubHTTPError, OfflineModeIsEnabled, RequestException):
        return  # what the cache has is checked as a folder
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    if not any(_matches(name, _WEIGHTS) for name in sizes):
        pickled = [name for name in sizes if name.endswith(".bin")]
        why = "only .bin files, which can run code when they are loaded" if pickled else "none"
        raise QuantizeError(f"{model} holds no safetensors weights ({why})")
    wanted = [name for name in sizes if _matches(name, _FILES) and not _matches(name, _NEVER)]
    missing = [name for name in wanted if not try_to_load_from_cache(model, name, revision=commit)]
    cache = Path(constants.HF_HUB_CACHE)
    needed, free = sum(sizes[name] for name in missing), _free(cache)
    if needed > free:
        raise QuantizeError(
            f"{model} is {in_units(needed)} to download, and {cache} has {in_units(free)} free: "
            "set HF_HOME to a folder on a larger disk"
        )


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
