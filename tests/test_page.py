"""The page at `/`: as files, and in a real browser against a server process of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from flask.testing import FlaskClient
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from app.api import create_app
from app.chat_page import read_page
from app.service import Service

from .browser import chromium, noted, resize, sent
from .live import ROOT, LiveServer, wait_for
from .services import SETTINGS
from .test_ops_port import free_port

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HOSTILE = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"
ANSWER = f"The **first** part. {HOSTILE}\n```python\nprint('<b>')\n```\nThe `last` part."
HELD_AT = 20  # behind "The **first** part. "

# --- files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> FlaskClient:
    return create_app(Service(SETTINGS)).test_client()


def test_page_has_the_policy_that_lets_nothing_in_from_elsewhere(client: FlaskClient) -> None:
    headers = client.get("/").headers
    assert headers["Content-Security-Policy"] == POLICY
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Content-Type"] == "text/html; charset=utf-8"


def test_every_file_of_the_folder_is_served_as_what_it_is(client: FlaskClient) -> None:
    folder = ROOT / "app" / "page"
    assert read_page().keys() == {file.name for file in folder.iterdir()}
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for file in folder.iterdir():
        if file.name == "index.html":
            continue
        response = client.get(f"/page/{file.name}")
        assert response.data == file.read_bytes()
        assert response.mimetype == types[file.suffix]
        assert response.headers["Content-Security-Policy"] == POLICY


@pytest.mark.parametrize("path", ["/", "/page/page.css"])
def test_file_that_a_browser_has_already_is_not_sent_again(client: FlaskClient, path: str) -> None:
    etag = client.get(path).headers["ETag"]
    again = client.get(path, headers={"If-None-Match": etag})
    assert (again.status_code, again.data, again.headers["ETag"]) == (304, b"", etag)
    assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "name", ["nope.js", "index.html", "..%2fapi.py", "../api.py", "main.js/", "%2e%2e/api.py"]
)
def test_no_other_file_can_be_had(client: FlaskClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_page_asks_only_for_files_that_are_there_and_writes_no_html() -> None:
    page = read_page()
    for name, file in page.items():
        text = file.content.decode()
        named = re.findall(r'(?:from "\./|(?:src|href)="page/)([^"]+)"', text)
        assert set(named) <= page.keys(), name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        written = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
        assert not re.search(rf"{written}|\sstyle=|\son\w+=", text), name


# --- in a browser ---------------------------------------------------------------------------------


class PageServer(LiveServer):
    module = "tests.page_server"


def page_server(folder: Path, *arguments: str, **environment: str) -> PageServer:
    folder.mkdir()
    (folder / "model.onnx").touch()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    sized = ("--max-batch-size", "4", "--max-model-len", "4096")
    return PageServer(folder, *sized, *arguments, **{"SCRIPT": ANSWER} | environment)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate") / "gate"


@pytest.fixture(scope="module")
def server(gate: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """Says `ANSWER`; holds it at `HELD_AT` while the gate is shut."""
    folder = tmp_path_factory.mktemp("models") / "model"
    with page_server(folder, HOLD_AT=str(HELD_AT), HOLD_GATE=str(gate)) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as browser:
        browser.set_script_timeout(60)
        yield browser


class Page:
    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser = browser
        self.url = url
        resize(browser, 1280, 800)
        noted(browser), sent(browser)  # what others have left
        browser.get(url)

    def find(self, css: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, css)

    def texts(self, css: str) -> list[str]:
        """Of elements that may be replaced meanwhile."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        found: list[str] = self.browser.execute_script(script, css)
        return found

    def text(self, css: str) -> str:
        return "\n".join(self.texts(css))

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        return wait_for(condition, f"{what}; the page has:\n{self.find('body').text}")

    def ask(self, text: str = "Hello") -> None:
        self.find("#text").send_keys(text, Keys.ENTER)

    def set(self, name: str, value: str) -> None:
        field = self.find(f"[name={name}]")
        field.clear()
        field.send_keys(value)

    def wait_answered(self, num_answers: int = 1) -> None:
        answered = ".answer:not([aria-busy])"
        self.wait(lambda: len(self.texts(answered)) == num_answers, "the whole answer")

    def asked(self) -> list[dict[str, Any]]:
        """Bodies that were sent since the last look."""
        requests = [each for each in sent(self.browser) if each["method"] == "POST"]
        return [json.loads(each["postData"]) for each in requests]


@pytest.fixture
def page(browser: Chrome, server: PageServer, gate: Path) -> Iterator[Page]:
    gate.touch()
    page = Page(browser, server.url)
    page.wait(lambda: page.text("#model") == "stub", "the model's name")
    yield page
    gate.touch()
    assert noted(browser) == []


def test_answer_is_shown_with_its_times_and_nothing_of_it_becomes_html(page: Page) -> None:
    page.ask("Hello <b>you</b>")
    page.wait_answered()
    assert page.texts(".you .body") == ["Hello <b>you</b>"]
    assert HOSTILE in page.text(".answer .body")
    assert page.texts(".answer strong") == ["first"]
    assert page.texts(".answer pre") == ["print('<b>')"]
    assert page.texts(".answer p code") == ["last"]
    assert page.texts(".body img, .body script, .body b") == []
    assert page.browser.title == "stub · phi-serve"
    shown = r"first token \d+ ms · [\d.]+ tokens/s · \d+ tokens"
    assert re.fullmatch(shown, page.text(".foot"))


def test_stream_is_seen_before_its_end(page: Page, gate: Path) -> None:
    gate.unlink()
    page.ask()
    page.wait(lambda: page.text(".answer .body") == "The first part.", "the first part")
    assert page.find("#stop").is_displayed()
    assert re.fullmatch(r"first token \d+ ms", page.text(".foot"))
    gate.touch()
    page.wait_answered()
    assert page.text(".answer .body").endswith("The last part.")
    assert not page.find("#stop").is_displayed()


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_keeps_what_there_is_and_frees_the_slot(
    page: Page, server: PageServer, gate: Path, way: str
) -> None:
    num_aborted = server.metric('request_success_total{finish_reason="abort"}')
    gate.unlink()
    page.ask()
    page.wait(lambda: page.text(".answer .body") == "The first part.", "the first part")
    assert server.metric("num_requests_running") == 1
    if way == "button":
        page.find("#stop").click()
    else:
        page.find("#text").send_keys(Keys.ESCAPE)
    page.wait_answered()
    gate.touch()
    name = 'request_success_total{finish_reason="abort"}'
    wait_for(lambda: server.metric(name) == num_aborted + 1, "the abort")
    wait_for(lambda: server.metric("num_requests_running") == 0, "a free slot")
    assert page.text(".foot").endswith("stopped")
    assert page.find("#send").is_displayed()
    page.ask("Again")  # the page goes on
    page.wait_answered(2)


def test_conversation_and_parameters_go_along_until_a_new_chat(page: Page) -> None:
    page.set("system", "Be brief.")
    page.set("temperature", "0.25")
    page.set("top_p", "")
    page.set("max_tokens", "3")
    page.set("seed", "7")
    page.set("stop", "zz")
    page.ask("One")
    page.wait_answered()
    assert page.text(".foot").endswith("3 tokens · hit the token limit")
    page.ask("Two")
    page.wait_answered(2)
    page.find("#new-chat").click()
    assert page.texts(".message") == []
    assert page.find("#welcome").is_displayed()
    page.ask("Three")
    page.wait_answered()
    first, second, third = page.asked()
    given = {"temperature": 0.25, "max_tokens": 3, "seed": 7, "stop": "zz", "stream": True}
    assert first == given | {
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One"},
        ],
    }
    said = [(each["role"], each["content"]) for each in second["messages"]]
    assert said[1:] == [("user", "One"), ("assistant", "The"), ("user", "Two")]
    assert [each["content"] for each in third["messages"]] == ["Be brief.", "Three"]


def test_refusal_is_told_and_can_be_tried_again(page: Page) -> None:
    page.set("temperature", "3")
    page.ask()
    page.wait(lambda: page.texts(".error[role=alert]")[1:], "the error")
    assert page.text(".answer .error").startswith("temperature: ")
    assert len(noted(page.browser)) == 1  # the browser's own line about a 400
    page.set("temperature", "1")
    page.find(".answer button").click()
    page.wait_answered()
    assert page.text(".answer .body").startswith("The first part.")
    page.ask("Two")
    page.wait_answered(2)
    assert len(page.asked()[-1]["messages"]) == 3  # what was refused is not told again


def test_number_that_is_none_is_told_and_not_sent(page: Page) -> None:
    page.set("seed", "1.5")
    page.ask()
    page.wait(lambda: page.texts(".answer .error"), "the error")
    assert page.text(".answer .error").startswith("seed: ")
    assert page.asked() == []


def test_shift_enter_is_a_new_line_and_every_control_can_be_reached_by_tab(page: Page) -> None:
    box = page.find("#text")
    assert page.browser.switch_to.active_element == box
    box.send_keys("One", Keys.SHIFT + Keys.ENTER, Keys.NULL, "Two")
    assert box.get_attribute("value") == "One\nTwo"
    assert page.texts(".message") == []
    reached = set()
    for _ in range(20):
        page.browser.switch_to.active_element.send_keys(Keys.TAB)
        active = page.browser.switch_to.active_element
        reached.add(active.get_attribute("id") or active.get_attribute("name") or active.text)
    assert reached >= {
        *("API", "key-button", "new-chat", "system", "temperature", "top_p", "max_tokens"),
        *("seed", "text", "send", "What is the capital of France?"),
    }


def test_every_field_has_a_label(page: Page) -> None:
    script = "return [...document.querySelectorAll('input, textarea')].map((e) => e.labels.length)"
    assert set(page.browser.execute_script(script)) == {1}


def test_tiles_show_the_servers_numbers(page: Page) -> None:
    def number(name: str) -> str:
        return page.text(f".tile[data-name={name}] .number")

    page.wait(lambda: number("batch_limit") == "4", "the batch limit")
    assert (number("num_requests_running"), number("num_requests_waiting")) == ("0", "0")
    for name in ("kv_cache_usage_ratio", "saturation_ratio", "engine_busy_ratio"):
        assert re.fullmatch(r"[\d.]+ %", number(name))
    page.wait(lambda: number("rate").isdecimal(), "a second look")
    drawn = page.find(".tile[data-name=batch_limit] .line").get_attribute("d")
    assert drawn is not None
    assert re.match(r"M[\d.]+ [\d.]+L", drawn)
    assert not page.find("#tiles-note").is_displayed()


def test_nothing_is_asked_while_nobody_looks(page: Page) -> None:
    script = """
        const done = arguments[0];
        let state = "hidden", runs = 0;
        Object.defineProperty(document, "visibilityState", { get: () => state });
        const see = (is) => { state = is; document.dispatchEvent(new Event("visibilitychange")); };
        const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
        import("/page/poll.js").then(async ({ whileVisible }) => {
            whileVisible(async () => { runs += 1; }, 1);
            await wait(30);
            const hidden = runs;
            see("visible");
            while (runs < 3) await wait(1);
            see("hidden");
            const seen = runs;
            await wait(30);
            done([hidden, runs - seen]);
        });
    """
    assert page.browser.execute_async_script(script) == [0, 0]


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_scrolls_sideways(page: Page, width: int) -> None:
    resize(page.browser, width, 800)
    page.ask("a" * 300)
    page.wait_answered()
    for id_ in ("live", "parameters"):
        page.browser.execute_script(f"document.getElementById('{id_}').open = true")
        script = "return [document.documentElement.scrollWidth, document.body.scrollWidth]"
        assert max(page.browser.execute_script(script)) <= width
        assert page.find("#send").rect["x"] + page.find("#send").rect["width"] <= width


def test_no_other_host_is_asked(page: Page) -> None:
    page.browser.get(page.url)
    page.wait(lambda: page.text("#model") == "stub", "the model's name")
    page.ask()
    page.wait_answered()
    urls = [urlsplit(each["url"]) for each in sent(page.browser)]
    assert {f"{url.scheme}://{url.netloc}" for url in urls} == {page.url}
    assert {url.path for url in urls} >= {"/", "/page/main.js", "/metrics", "/info"}


def test_key_is_asked_for_kept_for_the_tab_and_used(browser: Chrome, tmp_path: Path) -> None:
    """With the metrics on another port, which the tiles say."""
    keys, ops = {"API_KEYS": "ann:secret"}, ("--ops-port", str(free_port()))
    with page_server(tmp_path / "model", *ops, **keys) as server:
        page = Page(browser, server.url)
        page.wait(lambda: page.text("#model") == "needs an API key", "that a key is needed")
        page.wait(lambda: "OPS_PORT" in page.text("#tiles-note"), "a word about the tiles")
        page.ask()
        for key in ("wrong", "secret"):
            page.wait(lambda: page.find("#key-error").text, "the question for a key")
            page.find("#key").send_keys(key, Keys.ENTER)
            page.wait(
                lambda key=key: key == "secret" or "not one" in page.text("#key-error"), "a no"
            )
        page.wait_answered()
        page.wait(lambda: page.text("#model") == "stub", "the model's name")
        assert browser.execute_script("return [localStorage.length, document.cookie]") == [0, ""]
        browser.refresh()
        page.ask()
        page.wait_answered()
        metrics = [each for each in sent(browser) if each["url"].endswith("/metrics")]
        assert len(metrics) == 2  # once each time that the page was opened
        assert not any("Authorization" in each["headers"] for each in metrics)
    assert not [line for line in noted(browser) if "Content Security Policy" in line]


def test_model_that_loads_or_has_no_template_is_told(browser: Chrome, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    environment = {"LOAD_GATE": str(gate), "NO_CHAT": "1", "SCRIPT": " fell down."}
    with page_server(tmp_path / "model", **environment) as server:
        page = Page(browser, server.url)
        page.ask("It")
        page.wait(lambda: page.texts(".answer .error"), "the refusal")
        assert "waiting for a file" in page.text(".answer .error")
        page.wait(lambda: "waiting for a file" in page.text("#model"), "what the server does")
        gate.touch()
        page.wait(lambda: page.text("#model") == "stub", "the model's name")
        assert not page.find("[name=system]").is_displayed()
        page.find(".answer button").click()
        page.wait_answered()
        assert page.text(".answer .body") == " fell down."
        assert re.fullmatch(
            r"first token \d+ ms · [\d.]+ tokens/s · \d+ tokens", page.text(".foot")
        )
        assert page.asked()[-1]["prompt"] == "It"
    page.ask("Gone")
    page.wait(lambda: "cannot be reached" in page.text(".answer .error"), "the failure")
