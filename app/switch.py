"""From one model to another while requests run: load aside, test, switch, let the old one end.

Belongs to the hub; each model has an engine thread of its own. Whatever fails until the switch
itself leaves the old model as it was.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import gevent

from .bridge import State
from .errors import (
    Draining,
    NotReady,
    ServeError,
    SwitchFailed,
    SwitchRunning,
    UnservableFolder,
    UnservableModel,
)
from .origin import read_origin
from .served import Served
from .service import Service

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Switched:
    """`is_new` is False if the model at that place was served already."""

    is_new: bool
    served: Served
    seconds: float


def switch_model(service: Service, path: Path, *, is_forced: bool = False) -> Switched:
    """Waits until new requests go to the model at `path`; those that run stay with theirs.

    Raises UnservableFolder with the loader's report, SwitchFailed, SwitchRunning, NotReady while
    the first model loads and Draining; nothing has changed then.
    """
    _check_may(service)
    started_at = time.monotonic()
    served = service.prepare(replace(service.settings, model_path=path))
    service.loading = served
    try:
        if not is_forced and _is_current(service, path):
            service.discard(served)
            log.info("%s is served already, and has not changed", path)
            return Switched(False, service.current, time.monotonic() - started_at)
        log.info("loading %s beside the current model", path)
        _load(service, served)
    finally:
        service.loading = None
    old = service.adopt(served)
    seconds = time.monotonic() - started_at
    log.info("%s serves from now on, after %.1f s", served.model.name, seconds)
    gevent.spawn(_retire, service, old).link(lambda _: return_memory())
    return Switched(True, served, seconds)


def reload(service: Service) -> None:
    """SIGHUP: what lies at MODEL_PATH may be another model now. The log tells what came of it."""
    path = service.settings.model_path
    try:
        switch_model(service, path)
    except ServeError as error:
        log.error("SIGHUP: no switch to MODEL_PATH=%s: %s", path, error)


def loading_model(service: Service) -> dict[str, str] | None:
    """What is being switched to, and how far that is; for people."""
    if (served := service.loading) is None:
        return None
    return {"path": str(served.settings.model_path), "stage": served.bridge.pulse.stage}


def loading_folder(service: Service) -> dict[str, str] | None:
    """Likewise for anybody: paths of the machine are not told."""
    if (loading := loading_model(service)) is None:
        return None
    return {"folder": Path(loading["path"]).name, "stage": loading["stage"]}


def return_memory() -> None:
    """What only a dropped model used goes back to the system. On the hub, which stands still."""
    gc.unfreeze()  # cycles in what the load has frozen would stay for ever
    gc.collect()
    gc.freeze()
    with suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def _check_may(service: Service) -> None:
    if service.drain.is_announced:
        raise Draining("the server is draining: it loads no other model")
    if (loading := loading_model(service)) is not None:
        raise SwitchRunning(f"{loading['path']} is being loaded: {loading['stage']}")
    if service.state is not State.READY:
        raise NotReady(f"no switch yet: {service.bridge.why_not_served}")


def _is_current(service: Service, path: Path) -> bool:
    # Off the hub: it may lie on a slow disk.
    origin = service.bridge.off_hub(partial(read_origin, path))
    return origin == service.current.origin


def _load(service: Service, served: Served) -> None:
    bridge = served.bridge
    bridge.start()
    while bridge.state is State.LOADING and not service.drain.is_announced:
        gevent.sleep(_LOOK_SECONDS)
    if service.drain.is_announced:
        bridge.request_stop()  # its thread cannot be interrupted; the process ends soon
        raise Draining("the server is draining: the switch is given up")
    if bridge.state is State.READY:
        return
    error = _refusal(served)
    log.error("no switch to %s: %s", served.settings.model_path, error)
    # Not waited for: a load that was given up may still run.
    gevent.spawn(service.discard, served).link(lambda _: return_memory())
    raise error


def _refusal(served: Served) -> ServeError:
    path, failure = served.settings.model_path, served.bridge.failure
    if isinstance(failure, UnservableModel):
        return UnservableFolder(f"path: {failure}", param="path")
    return SwitchFailed(f"{path} cannot be served: {type(failure).__name__}: {failure}")


def _retire(service: Service, old: Served) -> None:
    """Its requests end when they end: a deadline, a client that leaves, a drain ends them too."""
    while old.is_in_use:
        gevent.sleep(_LOOK_SECONDS)
    old.bridge.request_stop()
    old.bridge.ended.wait()
    service.discard(old)
    log.info("%s has ended", old.settings.model_path)
