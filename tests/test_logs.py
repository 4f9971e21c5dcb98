"""What ends up on standard error: lines of JSON, of whatever makes them."""

from __future__ import annotations

import json
import subprocess
import sys

from .live import ROOT

_FAILING = """
import gevent
from app.logs import set_up, tell_hub_errors
set_up("info", "json")
hub = gevent.get_hub()
tell_hub_errors(hub)

def fail(text):
    raise ValueError("no luck")

gevent.spawn(fail, "a user's words").join()
hub.loop.run_callback(fail, "others")
gevent.sleep(0.01)
gevent.spawn(gevent.sleep, 9).kill()
"""


def test_greenlet_or_callback_that_fails_is_one_line_of_the_log() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FAILING], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["level"], line["logger"]) for line in lines] == [("ERROR", "app.logs")] * 2
    assert [line["message"].split("-")[0] for line in lines] == [
        "Greenlet",
        "callback has failed",
    ]
    assert all(line["exc_info"].endswith("in fail\nValueError: no luck") for line in lines)
    assert "a user's words" not in done.stderr
