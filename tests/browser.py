"""A headless Chromium for tests of pages, and what it has noted: its log, and whom it has asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

from .programs import needs


@contextmanager
def chromium(width: int = 1280, height: int = 800) -> Iterator[Chrome]:
    """Skips where it is missing, but in CI fails."""
    options = ChromeOptions()
    options.binary_location = needs("chromium")
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"),
        *("--disable-background-networking", "--no-first-run", "--disable-sync"),
        *("--disable-component-update", f"--window-size={width},{height}"),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, ChromeService(needs("chromedriver")))  # else selenium looks online
    try:
        yield driver
    finally:
        driver.quit()


def resize(driver: Chrome, width: int, height: int) -> None:
    """The viewport itself, which no window can be made as narrow as."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def noted(driver: Chrome) -> list[str]:
    """Warnings and errors that its log has had since it was last asked."""
    entries = driver.get_log("browser")
    return [each["message"] for each in entries if each["level"] in ("WARNING", "SEVERE")]


def sent(driver: Chrome) -> list[dict[str, Any]]:
    """Requests of the page since it was last asked: url, method, headers and postData."""
    messages = (json.loads(each["message"])["message"] for each in driver.get_log("performance"))
    return [
        message["params"]["request"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
