"""Switching models: who is answered by which, what a failure leaves, who may, what comes back."""

from __future__ import annotations

import gc
import hmac
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import gevent.event
import numpy as np
import psutil
import pytest
import requests
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from app.api import create_app
from app.bridge import Bridge
from app.config import read_settings
from app.engine import Engine
from app.errors import UnservableModel
from app.pulse import Pulse
from app.sequence import StepPlan
from app.served import Served
from app.service import Service
from app.switch import reload

from .conftest import TinyModel
from .edits import copy_of
from .engines import STUB_VOCAB, StubModel, loaded_model, stub_engine
from .folders import make_probe
from .live import LiveServer, wait_for
from .services import CODEC, SETTINGS, running, until
from .test_drain import stub_server
from .wire import Client, listening

KEY = "open-sesame"
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
CONTEXTS = {"a": 64, "b": 48}
REPORT = "broken/model.onnx cannot be served:\n- it has no logits\n- it has no cache"

# --- in process, on stub models -------------------------------------------------------------------


class Folders(Service):
    """The real service. A folder is its name: "a" and "b" differ in what they say and how much;
    others fail. `go_on` holds the load of "slow"."""

    def __init__(self, root: Path, **changes: Any) -> None:
        settings = replace(SETTINGS, model_path=root / "a", admin_api_key=KEY, max_batch_size=2)
        super().__init__(replace(settings, **changes))
        self.root = root
        self.stubs: dict[str, StubModel] = {}
        self.go_on = threading.Event()

    @property
    def num_running(self) -> float | None:
        """Of all engines."""
        return self.registry.get_sample_value("phi_serve_num_requests_running")

    def _load(self, served: Served) -> Engine:
        name = served.settings.model_path.name
        served.bridge.pulse.enter(f"reading {name}")
        if name == "broken":
            raise UnservableModel(REPORT)
        if name == "huge":
            raise MemoryError("no room for the weights")
        if name == "slow":
            assert self.go_on.wait(60)
        engine, stub = stub_engine(2, CONTEXTS.get(name, 64), observer=served.observer)
        stub.change = says(name)
        self.stubs[name] = stub
        served.loaded = loaded_model(name, CODEC, CONTEXTS.get(name, 64), STUB_VOCAB)
        return engine


def says(name: str) -> Callable[[StepPlan, Any], None]:
    def change(plan: StepPlan, logits: Any) -> None:
        if name == "mute":
            raise RuntimeError("the device is lost")
        if name == "b":
            logits[:] = np.roll(logits, 1, axis=1)

    return change


def held(name: str, go_on: threading.Event, num_rows: int = 1) -> Callable[[StepPlan, Any], None]:
    """It waits in each step that decodes so many rows or more."""

    def change(plan: StepPlan, logits: Any) -> None:
        if len(plan.decode) >= num_rows:
            assert go_on.wait(60)
        says(name)(plan, logits)

    return change


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folders]:
    monkeypatch.setattr(gc, "unfreeze", lambda: None)  # all of this session's: 0.3 s each time
    for name in ("a", "b", "slow"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx").write_text(name)
    with running(Folders(tmp_path)) as service:
        yield service
        service.go_on.set()


@pytest.fixture
def client(service: Folders) -> FlaskClient:
    return create_app(service).test_client()


def switch(client: FlaskClient, path: Path, **body: Any) -> TestResponse:
    asked = {"path": str(path)} | body
    return client.post("/admin/model", json=asked, headers=AUTHORIZATION, buffered=True)


def generate(client: FlaskClient, **body: Any) -> dict[str, Any]:
    payload = {"prompt": "a", "max_tokens": 9, "ignore_eos": True} | body
    response = client.post("/generate", json=payload, buffered=True)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.get_json()
    return answer


def told(client: FlaskClient) -> dict[str, Any]:
    response = client.get("/admin/model", headers=AUTHORIZATION)
    assert response.status_code == 200
    answer: dict[str, Any] = response.get_json()
    return answer


def error_of(response: TestResponse) -> tuple[int, str]:
    return response.status_code, response.get_json()["error"]["code"]


def what_is_said(answer: dict[str, Any]) -> tuple[str, str]:
    return answer["model"], answer["text"]


def test_new_requests_go_to_the_new_model_and_those_before_end_on_theirs(
    service: Folders, client: FlaskClient
) -> None:
    """Two run, one waits for a row."""
    alone = what_is_said(generate(client))
    go_on = threading.Event()
    have_come, hold = threading.Event(), held("a", go_on, num_rows=2)

    def change(plan: StepPlan, logits: Any) -> None:
        if plan.decode:  # none is done before all have come
            assert have_come.wait(60)
        hold(plan, logits)

    service.stubs["a"].change = change
    jobs = [gevent.spawn(generate, client) for _ in range(3)]
    until(lambda: len(service.current.bridge._streams) == 3)
    have_come.set()
    until(lambda: service.num_running == 2)
    response = switch(client, service.root / "b")
    answer = response.get_json()
    assert (response.status_code, answer["switched"], answer["model"]) == (200, True, "b")
    other = what_is_said(generate(client))
    assert other[0] == "b" and other[1] != alone[1]
    assert told(client)["retiring"] == [{"model": "a", "path": str(service.root / "a")}]
    until(lambda: service.num_running == 2)  # of the old one: the other has dropped its row
    go_on.set()
    assert [what_is_said(job.get(timeout=60)) for job in jobs] == [alone] * 3
    until(lambda: not service.retiring)
    assert what_is_said(generate(client)) == other
    switch(client, service.root / "a")
    assert what_is_said(generate(client)) == alone


def test_request_that_is_not_submitted_yet_keeps_the_model_it_has_taken(
    service: Folders, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose grammar is being compiled. Its limits are that model's, too."""
    old = service.current
    has_taken, go_on = gevent.event.Event(), gevent.event.Event()
    real = old.encode

    def slow(*arguments: Any, **options: Any) -> Any:
        has_taken.set()
        assert go_on.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(old, "encode", slow)
    job = gevent.spawn(generate, client, max_tokens=60)  # more than "b" has room for
    assert has_taken.wait(60)
    assert switch(client, service.root / "b").status_code == 200
    assert service.retiring == [old]
    assert old.is_in_use
    go_on.set()
    answer = job.get(timeout=60)
    assert (answer["model"], answer["usage"]["completion_tokens"]) == ("a", 60)
    until(lambda: not service.retiring)


def test_limits_and_info_are_those_of_the_new_model(service: Folders, client: FlaskClient) -> None:
    switch(client, service.root / "b")
    assert client.get("/info").get_json()["model"] == "b"
    assert client.get("/health/ready").get_json()["model"] == "b"
    assert client.get("/v1/models").get_json()["data"][0]["max_model_len"] == CONTEXTS["b"]
    response = client.post("/generate", json={"prompt": "a", "max_tokens": 60})
    assert error_of(response) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("name", "status", "code", "words"),
    [
        ("broken", 400, "unservable_model", REPORT),
        ("huge", 500, "switch_failed", "MemoryError: no room for the weights"),
        ("mute", 500, "switch_failed", "the self-test failed"),
    ],
)
def test_failure_is_told_and_leaves_the_old_model(
    service: Folders, client: FlaskClient, name: str, status: int, code: str, words: str
) -> None:
    alone = generate(client)
    response = switch(client, service.root / name)
    assert error_of(response) == (status, code)
    assert words in response.get_json()["error"]["message"]
    assert what_is_said(generate(client)) == what_is_said(alone)
    assert client.get("/health/ready").status_code == 200
    assert (told(client)["loading"], service.retiring) == (None, [])
    assert not service.ended.is_set()
    assert switch(client, service.root / "b").status_code == 200


def test_while_one_loads_the_old_one_serves_and_a_second_switch_is_refused(
    service: Folders, client: FlaskClient
) -> None:
    job = gevent.spawn(switch, client, service.root / "slow")
    until(lambda: service.loading and "reading slow" in service.loading.bridge.pulse.stage)
    refused = switch(client, service.root / "b")
    assert error_of(refused) == (409, "switch_running")
    assert "slow is being loaded: reading slow for" in refused.get_json()["error"]["message"]
    assert client.get("/health/ready").get_json()["model"] == "a"
    assert generate(client)["model"] == "a"
    now = time.monotonic()
    service.loading.bridge.pulse._clock = lambda: now  # it is told twice, of the same moment
    loading = told(client)["loading"]
    assert loading["path"] == str(service.root / "slow")
    assert loading["stage"].startswith("reading slow for")
    assert client.get("/info").get_json()["loading"] == {
        "folder": "slow",
        "stage": loading["stage"],
    }
    assert service.registry.get_sample_value("phi_serve_batch_limit") == 2
    service.go_on.set()
    assert job.get(timeout=60).get_json()["switched"] is True
    assert client.get("/info").get_json()["loading"] is None


def test_no_switch_before_the_first_model_is_loaded(tmp_path: Path) -> None:
    service = Folders(tmp_path)
    response = switch(create_app(service).test_client(), tmp_path / "b")
    assert error_of(response) == (503, "not_ready")
    service.request_stop()


def test_what_is_served_already_is_loaded_only_if_forced(
    service: Folders, client: FlaskClient
) -> None:
    served = service.current
    response = switch(client, service.root / "a")
    assert (response.status_code, response.get_json()["switched"]) == (200, False)
    assert service.current is served
    assert switch(client, service.root / "a", force=True).get_json()["switched"] is True
    assert service.current is not served


def test_changed_file_makes_another_model(service: Folders, client: FlaskClient) -> None:
    (service.root / "a" / "model.onnx").write_text("longer")
    assert switch(client, service.root / "a").get_json()["switched"] is True


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ({"Authorization": f"Basic {KEY}"}, 401, "invalid_api_key"),
        ({"Authorization": KEY}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer \xe9"}, 401, "invalid_api_key"),
        ({"Authorization": f"bearer  {KEY}"}, 200, None),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_key_is_needed(
    service: Folders,
    client: FlaskClient,
    method: str,
    headers: dict[str, str],
    status: int,
    code: str | None,
) -> None:
    body = {"path": str(service.root / "b")}
    response = client.open("/admin/model", method=method, json=body, headers=headers)
    assert response.status_code == status
    if code is not None:
        assert response.get_json()["error"]["code"] == code
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert service.current.model.name == "a"


def test_comparing_keys_takes_as_long_whatever_their_lengths(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def count(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr("app.admin_api.hmac.compare_digest", count)
    for given, status in [(KEY, 200), (KEY[:-1], 401), ("x" * 100, 401)]:
        headers = {"Authorization": f"Bearer {given}"}
        assert client.get("/admin/model", headers=headers).status_code == status
    assert compared == [(32, 32)] * 3


def test_without_a_key_in_the_settings_nobody_may(service: Folders) -> None:
    service.settings = replace(service.settings, admin_api_key="")
    client = create_app(service).test_client()
    for response in (
        switch(client, service.root / "b"),
        client.get("/admin/model", headers={"Authorization": "Bearer "}),
    ):
        assert error_of(response) == (403, "admin_off")
        assert "ADMIN_API_KEY" in response.get_json()["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"path": ""}, {"path": "a\0b"}, {"path": 1}, {"x": 1}])
def test_body_names_a_path(service: Folders, client: FlaskClient, body: dict[str, Any]) -> None:
    response = client.post("/admin/model", json=body, headers=AUTHORIZATION)
    assert error_of(response) == (400, "invalid_value")


def test_client_that_leaves_does_not_stop_the_switch(service: Folders) -> None:
    with listening(service) as server, Client(server.server_port) as client:
        payload = f'{{"path": "{service.root / "slow"}"}}'.encode()
        head = f"POST /admin/model HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        client.socket.sendall(head.encode() + payload)
        until(lambda: service.loading and "reading slow" in service.loading.bridge.pulse.stage)
        client.reset()
        service.go_on.set()
        until(lambda: service.current.loaded and service.current.loaded.name == "slow")


def test_signal_gives_the_switch_up_and_ends_the_server(
    service: Folders, client: FlaskClient
) -> None:
    """Though the load goes on, and cannot be interrupted."""
    job = gevent.spawn(switch, client, service.root / "slow")
    until(lambda: service.loading and "reading slow" in service.loading.bridge.pulse.stage)
    service.drain.hear()
    assert error_of(job.get(timeout=60)) == (503, "draining")
    until(service.ended.is_set)
    assert error_of(switch(client, service.root / "b")) == (503, "draining")


def test_drain_waits_for_requests_on_both_models(service: Folders, client: FlaskClient) -> None:
    gates = {name: threading.Event() for name in CONTEXTS}
    service.stubs["a"].change = held("a", gates["a"])
    jobs = [gevent.spawn(generate, client)]
    until(lambda: service.current.bridge.has_streams)
    switch(client, service.root / "b")
    service.stubs["b"].change = held("b", gates["b"])
    jobs.append(gevent.spawn(generate, client))
    until(lambda: service.current.bridge.has_streams)
    service.drain.hear()
    gates["b"].set()
    assert jobs[1].get(timeout=60)["model"] == "b"
    assert not service.ended.is_set()
    gates["a"].set()
    assert jobs[0].get(timeout=60)["model"] == "a"
    until(service.ended.is_set)


def test_stop_ends_requests_on_both_models(service: Folders, client: FlaskClient) -> None:
    go_on = threading.Event()
    service.stubs["a"].change = held("a", go_on)
    job = gevent.spawn(client.post, "/generate", json={"prompt": "a"})
    until(lambda: service.current.bridge.has_streams)
    switch(client, service.root / "b")
    for _ in range(2):
        service.drain.hear()
    assert error_of(job.get(timeout=60)) == (503, "draining")
    go_on.set()
    until(service.ended.is_set)


@pytest.mark.parametrize("dies", ["a", "b"])
def test_death_of_the_current_engine_ends_the_server_and_that_of_a_retiring_one_does_not(
    service: Folders, client: FlaskClient, dies: str
) -> None:
    go_on = threading.Event()
    service.stubs["a"].change = held("a", go_on)
    job = gevent.spawn(client.post, "/generate", json={"prompt": "a", "max_tokens": 9})
    until(lambda: service.current.bridge.has_streams)
    switch(client, service.root / "b")

    def die(plan: StepPlan, logits: Any) -> None:
        raise SystemExit("a stub's death")

    service.stubs[dies].change = die
    if dies == "b":
        assert error_of(client.post("/generate", json={"prompt": "a"})) == (500, "model_failure")
        until(service.ended.is_set)
        go_on.set()
        return
    go_on.set()  # the step that is held still succeeds
    assert error_of(job.get(timeout=60)) == (500, "model_failure")
    until(lambda: not service.retiring)
    assert generate(client)["model"] == "b"
    assert not service.ended.is_set()


class Hang:
    """Of a model, with its bridge's clock, from the first token that it decodes."""

    def __init__(self, bridge: Bridge) -> None:
        self.is_reached, self.go_on = threading.Event(), threading.Event()
        self.now = 1000.0
        bridge._thread.pulse = Pulse(60, lambda: self.now)

    def __call__(self, plan: StepPlan, logits: Any) -> None:
        if plan.decode:
            self.is_reached.set()
            assert self.go_on.wait(60)


def test_while_an_old_model_still_answers_no_third_one_is_loaded(
    service: Folders, client: FlaskClient
) -> None:
    go_on = threading.Event()
    service.stubs["a"].change = held("a", go_on)
    job = gevent.spawn(generate, client)
    until(lambda: service.num_running)
    assert switch(client, service.root / "b").status_code == 200
    refused = switch(client, service.root / "c")
    assert error_of(refused) == (409, "switch_running")
    said = f"{service.root / 'a'} was served before, and still answers: 1 sequences are open"
    assert said in refused.get_json()["error"]["message"]
    go_on.set()
    assert job.get(timeout=60)["model"] == "a"
    until(lambda: not service.retiring)
    assert switch(client, service.root / "c").status_code == 200


def test_while_a_load_that_was_given_up_runs_no_other_one_begins(
    service: Folders, client: FlaskClient
) -> None:
    job = gevent.spawn(switch, client, service.root / "slow")
    until(lambda: service.loading and "reading slow" in service.loading.bridge.pulse.stage)
    assert service.loading is not None
    service.loading.bridge._give_up_load()  # as MAX_LOAD_SECONDS does
    assert error_of(job.get(timeout=60)) == (400, "unservable_model")
    refused = switch(client, service.root / "b")
    assert error_of(refused) == (409, "switch_running")
    said = f"the load of {service.root / 'slow'} was given up, but cannot be interrupted: reading"
    assert said in refused.get_json()["error"]["message"]
    service.go_on.set()
    until(lambda: not service.given_up)
    assert switch(client, service.root / "b").status_code == 200


def test_old_model_that_hangs_ends_its_requests_and_no_later_switch_waits_for_it(
    service: Folders, client: FlaskClient
) -> None:
    service.stubs["a"].change = hang = Hang(service.bridge)
    job = gevent.spawn(client.post, "/generate", json={"prompt": "a"}, buffered=True)
    until(hang.is_reached.is_set)
    assert switch(client, service.root / "b").status_code == 200
    assert not job.dead
    hang.now += 61
    response = job.get(timeout=60)
    assert error_of(response) == (500, "model_failure")
    assert "the model hangs" in response.get_json()["error"]["message"]
    assert switch(client, service.root / "c").status_code == 200
    assert service.root / "a" in [each.settings.model_path for each in service.retiring]
    hang.go_on.set()  # its memory is returned if it ever goes on
    until(lambda: not service.retiring)


def test_switch_cures_a_model_that_hangs_though_its_folder_is_the_same(
    service: Folders, client: FlaskClient
) -> None:
    alone = what_is_said(generate(client))
    service.stubs["a"].change = hang = Hang(service.bridge)
    job = gevent.spawn(client.post, "/generate", json={"prompt": "a"}, buffered=True)
    until(hang.is_reached.is_set)
    hang.now += 61
    assert "the model hangs" in client.get("/health/ready").text
    assert switch(client, service.root / "a").get_json()["switched"] is True
    assert error_of(job.get(timeout=60)) == (500, "model_failure")
    assert client.get("/health/ready").status_code == 200
    assert what_is_said(generate(client)) == alone
    hang.go_on.set()
    until(lambda: not service.retiring)


def test_loop_of_links_is_refused_as_any_wrong_folder(
    service: Folders, client: FlaskClient
) -> None:
    (service.root / "broken").symlink_to("broken")
    assert error_of(switch(client, service.root / "broken")) == (400, "unservable_model")


def test_failure_before_the_load_leaves_nothing_behind(
    service: Folders,
    client: FlaskClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(path: Path) -> None:
        raise RuntimeError("a bug")

    num_observers = len(service.metrics._engines)
    with monkeypatch.context() as patch:
        patch.setattr("app.switch.read_origin", fail)
        assert switch(client, service.root / "b").status_code == 500
        reload(service)
    assert (service.loading, service.given_up) == (None, [])
    assert len(service.metrics._engines) == num_observers
    assert f"SIGHUP: no switch to MODEL_PATH={service.root / 'a'}" in caplog.messages
    assert switch(client, service.root / "b").status_code == 200


def test_hangup_that_has_to_wait_takes_effect_once_for_all(
    service: Folders, client: FlaskClient
) -> None:
    """Here for requests of the model before."""
    go_on = threading.Event()
    service.stubs["a"].change = held("a", go_on)
    job = gevent.spawn(generate, client)
    until(lambda: service.num_running)
    switch(client, service.root / "b")
    hangups = [gevent.spawn(reload, service) for _ in range(3)]
    gevent.joinall(hangups[1:], timeout=60)
    assert [hangup.dead for hangup in hangups] == [False, True, True]
    assert (service.loading, service.current.model.name) == (None, "b")
    go_on.set()
    job.get(timeout=60)
    hangups[0].get(timeout=60)
    assert service.current.model.name == "a"


def test_switch_that_a_signal_gives_up_is_told_in_the_log(
    service: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    service.settings = replace(service.settings, model_path=service.root / "slow")
    job = gevent.spawn(reload, service)
    until(lambda: service.loading and "reading slow" in service.loading.bridge.pulse.stage)
    service.drain.hear()
    job.get(timeout=60)
    said = "the server is draining: the switch is given up"
    assert f"no switch to {service.root / 'slow'}: {said}" in caplog.messages


# --- a process ------------------------------------------------------------------------------------


def test_signals_while_a_model_loads(tmp_path: Path) -> None:
    """A hangup in the first load is remembered; one that SIGTERM gives up tells its end."""
    folder, gate = tmp_path / "model", tmp_path / "loaded"
    with stub_server(folder, 2, LOAD_GATE=str(gate)) as server:
        wait_for(lambda: "waiting for a file" in server.get("/health/ready").text, "the load")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "it takes effect once the model is loaded" in server.log, "the hangup")
        gate.touch()
        wait_for(lambda: "is served already, and has not changed" in server.log, "its effect")
        gate.unlink()
        (folder / "more").touch()
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "beside the current model" in server.log, "another load")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        server._reader.join()
        assert f"no switch to {folder}: the server is draining" in server.log


# --- real models ----------------------------------------------------------------------------------

NUM_SWITCHES = 6
MAX_LEN = 200


def test_memory_of_a_model_that_was_switched_from_comes_back(
    tiny_phi3: TinyModel, tiny_llama: TinyModel
) -> None:
    service = Service(
        replace(
            read_settings(["--model", str(tiny_phi3.folder), "--threads", "1"]), admin_api_key=KEY
        )
    )
    process = psutil.Process()
    with gevent.Timeout(120), running(service):
        client = create_app(service).test_client()
        held_by: list[list[weakref.ref[Any]]] = []
        sizes = []
        for i in range(NUM_SWITCHES):
            engine: Any = service.bridge._engine
            held_by.append([weakref.ref(engine), weakref.ref(engine._cache)])
            held_by[-1] += [weakref.ref(engine._model), weakref.ref(service.current.model.codec)]
            held_by[-1] += [weakref.ref(engine._model._form._session)]
            del engine
            generate(client, max_tokens=30)
            path = (tiny_llama, tiny_phi3)[i % 2].folder
            assert switch(client, path).get_json()["switched"] is True
            until(lambda: not service.retiring)
            gevent.sleep(0)  # behind it memory is returned
            sizes.append(process.memory_info().rss)
        assert [[ref() is None for ref in refs] for refs in held_by] == [[True] * 5] * NUM_SWITCHES
    # The first ones warm up.
    assert max(sizes[3:]) - sizes[2] < 8 << 20
    gc.collect()


class Admin(LiveServer):
    def switch(self, path: Path, **body: Any) -> requests.Response:
        asked = {"path": str(path)} | body
        url = self.url + "/admin/model"
        return requests.post(url, json=asked, headers=AUTHORIZATION, timeout=120)

    def answer(self, num_tokens: int) -> tuple[str, str]:
        fields = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        events = list(self.stream("The river", **fields))
        return events[-1]["model"], "".join(event["text"] for event in events)


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory, tiny_phi3: TinyModel) -> Path:
    link = tmp_path_factory.mktemp("models") / "current"
    link.symlink_to(tiny_phi3.folder)
    return link


@pytest.fixture(scope="module")
def server(link: Path) -> Iterator[Admin]:
    arguments = ("--threads", "1", "--max-model-len", str(MAX_LEN), "--max-batch-size", "2")
    with Admin(link, *arguments, ADMIN_API_KEY=KEY) as server:
        yield server


def test_streams_around_a_switch_each_say_what_their_own_model_says(
    server: Admin, tiny_phi3: TinyModel, tiny_llama: TinyModel
) -> None:
    """Three at a time on two rows, so that some wait; bit by bit as in quiet."""
    server.wait_ready()
    alone = {server.answer(30)}
    answers: list[tuple[str, str]] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append(server.answer(30))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(answers) > 3, "answers of the first model")
    assert server.switch(tiny_llama.folder).json()["switched"] is True
    num_old = len(answers)
    wait_for(lambda: len(answers) > num_old + 3, "answers of the second model")
    is_over.set()
    for thread in threads:
        thread.join()
    alone.add(server.answer(30))
    assert len(alone) == 2
    assert set(answers) == alone


def wrong_folders(tiny: TinyModel, root: Path) -> dict[str, Path]:
    broken, probed, short = root / "broken", root / "probed", root / "short"
    for folder in (broken, probed, short):
        folder.mkdir()
    broken = copy_of(tiny.folder, broken)
    graph = broken / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:1000])
    probe = make_probe(tiny.folder, [5, 80, 17])
    probe["top_logits"] = [9.0] * len(probe["top_logits"])
    short = copy_of(tiny.folder, short)
    config = short / "config.json"
    config.write_text(config.read_text().replace("256", str(MAX_LEN - 1)))
    return {
        "nowhere": root / "nowhere",
        "is not an ONNX graph, or cut short": broken,
        "computes other numbers": copy_of(tiny.folder, probed, probe=probe),
        f"MAX_MODEL_LEN: {MAX_LEN} is more than the model's context": short,
    }


def test_folder_that_cannot_be_served_is_refused_with_the_loaders_report(
    server: Admin, tiny_llama: TinyModel, tmp_path: Path
) -> None:
    before = server.wait_ready().answer(20)
    for words, folder in wrong_folders(tiny_llama, tmp_path).items():
        response = server.switch(folder)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("unservable_model", "path")
        assert words in error["message"]
        assert server.answer(20) == before


def test_hangup_switches_to_what_the_link_leads_to_now(
    server: Admin, link: Path, tiny_phi3: TinyModel, tiny_llama: TinyModel
) -> None:
    server.wait_ready()

    def hang_up(folder: Path) -> None:
        other = link.with_name("other")
        other.symlink_to(folder)
        other.replace(link)  # at once, as Kubernetes does it
        server.process.send_signal(signal.SIGHUP)

    def is_served(folder: Path) -> bool:
        told = requests.get(server.url + "/admin/model", headers=AUTHORIZATION, timeout=60).json()
        return bool(told["path"] == str(folder.resolve()))

    for folder in (tiny_phi3.folder, tiny_llama.folder):
        hang_up(folder)
        wait_for(partial(is_served, folder), "the switch")
    num_told = server.log.count("is served already, and has not changed")
    hang_up(tiny_llama.folder)
    wait_for(
        lambda: server.log.count("is served already, and has not changed") > num_told, "the log"
    )
    hang_up(link.parent / "nothing")
    wait_for(lambda: "SIGHUP: no switch to MODEL_PATH" in server.log, "the log")
    assert server.get("/health/ready").status_code == 200
