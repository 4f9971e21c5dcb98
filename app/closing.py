"""What is to be done behind the last byte of an answer, however it ends. Belongs to the hub."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

log = logging.getLogger(__name__)


def call_closing(
    app: Any, environ: dict[str, Any], start_response: Any, on_close: Callable[[], None]
) -> Iterable[bytes]:
    """The answer of a WSGI `app`. `on_close` is called once it is closed, or if `app` raises."""
    try:
        return _Closing(app(environ, start_response), on_close)
    except BaseException:
        on_close()
        raise


class _Closing:
    """An answer's body. `on_close` is called whatever the body's own end does; that is of no
    concern to others who wait for the end."""

    def __init__(self, body: Iterable[bytes], on_close: Callable[[], None]) -> None:
        self._body = body
        self._on_close = on_close

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._body)

    def close(self) -> None:
        try:
            if (close := getattr(self._body, "close", None)) is not None:
                close()
        except Exception:
            log.exception("an answer's end has failed")
        finally:
            self._on_close()
