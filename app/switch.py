"""From one model to another while requests run: load aside, test, switch, let the old one end.

Belongs to the hub; each model has an engine thread of its own. Whatever fails until the switch
itself leaves the old model as it was.
"""

from __future__ import annotations

import logging
import time
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
from .garbage import return_memory
from .origin import read_origin
from .served import Served
from .service import Service

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02
_END_SECONDS = 1.0  # in which the thread of a load that failed has ended, and memory is back


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
    service.loading = served = service.prepare(replace(service.settings, model_path=path))
    try:
        if not is_forced and _is_current(service, path):
            service.discard(served)
            log.info("%s is served already, and has not changed", path)
            return Switched(False, service.current, time.monotonic() - started_at)
        log.info("loading %s beside the current model", path)
        _load(service, served)
        old = service.adopt(served)
    except BaseException as error:
        log.error("no switch to %s: %s", path, error)
        _give_up(service, served)
        raise
    finally:
        service.loading = None
    seconds = time.monotonic() - started_at
    log.info("%s serves from now on, after %.1f s", served.model.name, seconds)
    gevent.spawn(_retire, service, old).link(lambda _: return_memory())
    return Switched(True, served, seconds)


def reload(service: Service) -> None:
    """SIGHUP: what lies at MODEL_PATH may be another model now. The log tells what came of it.

    While no switch is possible yet this waits, once for all signals that come meanwhile.
    """
    if service.is_reload_due:
        return
    path = service.settings.model_path
    service.is_reload_due = True
    try:
        _wait_for_turn(service)
        service.is_reload_due = False
        switch_model(service, path)
    except ServeError as error:
        log.error("SIGHUP: no switch to MODEL_PATH=%s: %s", path, error)
    except Exception:
        log.exception("SIGHUP: no switch to MODEL_PATH=%s", path)


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


def _check_may(service: Service) -> None:
    if service.drain.is_announced:
        raise Draining("the server is draining: it loads no other model")
    if service.state is not State.READY:
        raise NotReady(f"no switch yet: {service.bridge.why_not_served}")
    if (reason := _why_not_yet(service)) is not None:
        raise SwitchRunning(reason)


def _why_not_yet(service: Service) -> str | None:
    """No third model comes into memory. One that hangs is not waited for: it may never end."""
    if (loading := loading_model(service)) is not None:
        return f"{loading['path']} is being loaded: {loading['stage']}"
    for served in service.retiring:
        if served.bridge.pulse.stalled_seconds is None:
            path, num_streams = served.settings.model_path, served.bridge.num_streams
            return f"{path} was served before, and still answers: {num_streams} sequences are open"
    for served in service.given_up:
        path, stage = served.settings.model_path, served.bridge.pulse.stage
        return f"the load of {path} was given up, but cannot be interrupted: {stage}"
    return None


def _wait_for_turn(service: Service) -> None:
    if service.state is State.LOADING:
        log.info("SIGHUP: it takes effect once the model is loaded")
    elif (reason := _why_not_yet(service)) is not None:
        log.info("SIGHUP: no switch yet, it comes later: %s", reason)
    while service.state is State.LOADING or _why_not_yet(service) is not None:
        if service.drain.announced.wait(_LOOK_SECONDS):
            return  # to be refused


def _is_current(service: Service, path: Path) -> bool:
    if not service.bridge.is_ready:  # as one that hangs, which another load may cure
        return False
    # Off the hub: it may lie on a slow disk.
    origin = service.bridge.off_hub(partial(read_origin, path))
    return origin == service.current.origin


def _load(service: Service, served: Served) -> None:
    bridge = served.bridge
    bridge.start()
    while bridge.state is State.LOADING and not service.drain.announced.wait(_LOOK_SECONDS):
        pass
    if service.drain.is_announced:
        raise Draining("the server is draining: the switch is given up")
    if bridge.state is not State.READY:
        raise _refusal(served)


def _give_up(service: Service, served: Served) -> None:
    """It never serves. Its thread cannot be interrupted: while that loads it is `given_up`."""
    served.bridge.request_stop()
    service.given_up.append(served)
    ending = gevent.spawn(service.discard, served)
    ending.link(lambda _: return_memory())
    if not service.drain.is_announced:  # or the process ends soon
        ending.join(_END_SECONDS)


def _refusal(served: Served) -> ServeError:
    path, failure = served.settings.model_path, served.bridge.failure
    if isinstance(failure, UnservableModel):
        return UnservableFolder(f"path: {failure}", param="path")
    return SwitchFailed(f"{path} cannot be served: {type(failure).__name__}: {failure}")


def _retire(service: Service, old: Served) -> None:
    """Its requests end when they end: a deadline, a client that leaves, a drain ends them too."""
    bridge, path = old.bridge, old.settings.model_path
    while old.is_in_use and bridge.pulse.stalled_seconds is None:
        gevent.sleep(_LOOK_SECONDS)
    if (seconds := bridge.pulse.stalled_seconds) is not None:
        log.error(
            "%s hangs for %.0f s: its %d sequences end with an error, and its memory comes back "
            "only if it goes on",
            *(path, seconds, bridge.num_streams),
        )
        bridge.give_up()
    else:
        bridge.request_stop()
    bridge.ended.wait()
    service.discard(old)
    log.info("%s has ended", path)
