"""`python -m app`: binds the socket, loads the model, serves until SIGTERM."""

from __future__ import annotations

import os
import signal

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _hear_signals() -> None:
    """A container's first process gets only the signals that it asks for. Nothing to drain yet."""
    for number in _SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the load reads what is there now anyway


if __name__ == "__main__":  # the imports take their time already
    _hear_signals()

import logging
import sys
from typing import TYPE_CHECKING

from .machine import quiet_libraries

quiet_libraries()  # before any is imported

from .config import read_settings
from .logs import set_up, tell_hub_errors
from .machine import available_cpus, limit_threads

if TYPE_CHECKING:
    from .edge import Edge
    from .service import Service

log = logging.getLogger("app")


def main() -> int:
    _hear_signals()  # where another program has imported this
    settings = read_settings()
    set_up(settings.log_level, settings.log_format)
    limit_threads(settings.threads or available_cpus())
    # Settings are right: only now the slower imports.
    import gevent

    from .service import Service

    tell_hub_errors(gevent.get_hub())
    service = Service(settings)
    status = _serve(service)
    if service.tracing is not None:
        service.tracing.close()
    log.info("ended with status %d%s", status, _told_of_drain(service))
    return status


def _serve(service: Service) -> int:
    """To its end; the exit status."""
    import gevent

    from .bridge import State
    from .errors import WrongSetting
    from .switch import reload

    if (servers := _bind(service)) is None:
        return 2
    for number in _SIGNALS:
        gevent.signal_handler(number, service.drain.hear)
    gevent.signal_handler(signal.SIGHUP, reload, service)
    service.bridge.start()
    for words, server in servers.items():
        server.start()
        log.info("%s on %s", words, server.url)
    gevent.spawn(service.guard.keep)
    gevent.spawn(service.readiness.keep)
    service.ended.wait()
    gevent.joinall([gevent.spawn(server.stop, 1) for server in servers.values()])
    if service.bridge.state is State.FAILED:
        log.critical("cannot serve: %s", _told(service))
        return 2 if isinstance(service.bridge.failure, WrongSetting) else 1
    return 0


def _bind(service: Service) -> dict[str, Edge] | None:
    """The servers, by what they do; None if a port cannot be had, which has been told."""
    from .api import create_app, create_ops_app
    from .edge import bind, bind_ops

    settings, count = service.settings, service.metrics.rejected
    names = f"HOST={settings.host} PORT={settings.port}"
    try:
        servers = {"listening": bind(create_app(service), settings, count, service.tracing)}
        names = f"OPS_HOST={settings.ops_host} OPS_PORT={settings.ops_port}"
        if (ops := bind_ops(create_ops_app(service), settings, count)) is not None:
            servers["health and metrics"] = ops
    except OSError as error:
        log.critical("%s: %s", names, error.strerror)
        return None
    return servers


def _told(service: Service) -> str:
    """A report is the whole message; other errors may have none. One of a setting names it, and
    one of the load names the folder's."""
    from .errors import UnservableModel, WrongSetting

    failure = service.bridge.failure
    told = str(failure) if isinstance(failure, UnservableModel) else repr(failure)
    if isinstance(failure, WrongSetting) or service.bridge.was_ready:
        return told
    return f"{told} (MODEL_PATH={service.current.settings.model_path})"


def _told_of_drain(service: Service) -> str:
    drain = service.drain
    if not drain.is_announced:
        return ""
    return (
        f"; requests since the signal: {drain.num_finished} finished, "
        f"{drain.num_cut_short} cut short, {drain.num_refused} refused"
    )


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A load in progress cannot be interrupted; its thread must not hold the exit up.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
