"""Take the README's screenshot of the page at `/`: a real server, a real answer, a real browser.

    python scripts/take_screenshot.py [--model models/default] [--output docs/page.png]

Needs chromium and chromedriver (Debian: chromium, chromium-driver), and selenium. Three more
conversations run beside the one that is seen, so that the tiles show something. The picture is
1280x800, in light colours, and refused beyond 200 kB.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from compare_baseline import serving
from selenium.webdriver import Chrome, ChromeOptions, ChromeService, Keys
from selenium.webdriver.common.by import By

ROOT = Path(__file__).parents[1]
MAX_BYTES = 200_000
WIDTH, HEIGHT = 1280, 800
GIVE_UP_SECONDS = 180.0
QUESTION = "Explain gravity to a child."
NEXT = "Write a Python function that adds two numbers."
OTHERS = ("Tell me about the sea.", "Tell me about the moon.", "Tell me about trees.")


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    give_up_at = time.monotonic() + GIVE_UP_SECONDS
    while time.monotonic() < give_up_at:
        if found := condition():
            return found
        time.sleep(0.05)
    raise click.ClickException(f"waited {GIVE_UP_SECONDS:.0f} s for {what}")


@contextmanager
def browser() -> Iterator[Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise click.ClickException("chromium and chromedriver are needed")
    options = ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    chrome = Chrome(options, ChromeService(driver))
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", light)
    try:
        yield chrome
    finally:
        chrome.quit()


def ask(address: str, question: str) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 400, "seed": 1}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=GIVE_UP_SECONDS).read()


def say(chrome: Chrome, text: str, num_answers: int) -> None:
    """Until that has been answered."""
    chrome.find_element(By.ID, "text").send_keys(text, Keys.ENTER)
    answered = ".answer:not([aria-busy])"
    wait_for(
        lambda: len(chrome.find_elements(By.CSS_SELECTOR, answered)) == num_answers, "an answer"
    )


def number(chrome: Chrome, name: str) -> str:
    tile = f".tile[data-name={name}] .number"
    return str(chrome.find_element(By.CSS_SELECTOR, tile).text)


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=ROOT / "models" / "default")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "docs" / "page.png")
def main(model: Path, output: Path) -> None:
    with serving("-m", "app", "--model", str(model)) as server, browser() as chrome:
        address = server.url
        chrome.get(address)
        wait_for(lambda: chrome.find_elements(By.CSS_SELECTOR, "[data-state=ready]"), "readiness")
        for name, value in (("temperature", "0"), ("max_tokens", "160"), ("top_p", "")):
            field = chrome.find_element(By.NAME, name)
            field.clear()
            field.send_keys(value)
        others = [threading.Thread(target=ask, args=(address, each)) for each in OTHERS]
        others[0].start()
        say(chrome, QUESTION, 1)
        for other in others[1:]:
            other.start()
        say(chrome, NEXT, 2)
        wait_for(lambda: number(chrome, "num_requests_running") not in ("–", "0"), "the tiles")
        chrome.find_element(By.TAG_NAME, "h1").click()
        output.write_bytes(chrome.get_screenshot_as_png())
        for other in others:
            other.join()
    if output.stat().st_size > MAX_BYTES:
        raise click.ClickException(f"{output} has {output.stat().st_size} bytes")
    click.echo(f"{output}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
