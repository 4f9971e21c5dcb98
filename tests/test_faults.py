"""Faults of every kind at every place, with clients of every behaviour, on real sockets; behind
each of them the same must be true (`Rig.check`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import numpy as np
import pytest

from app.bridge import State
from app.sequence import FinishReason, StepPlan

from .engines import StubModel
from .faults import (
    DEADLY,
    FAULTS,
    GENERATE,
    HARMLESS,
    LIMIT_SECONDS,
    NUM_ROWS,
    PLACES,
    SECRET,
    STREAM,
    Place,
    Rig,
    Trap,
    bury,
    rigged,
)
from .services import CODEC, hold_until, until
from .wire import WAYS, Client


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    with rigged() as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig, capfd: pytest.CaptureFixture[str]) -> Iterator[Rig]:
    """Behind it a request for all rows is answered, and gevent has printed nothing."""
    shared.begin()
    yield shared
    shared.check_serves()
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture
def mortal(capfd: pytest.CaptureFixture[str]) -> Iterator[Rig]:
    """One of its own, whose engine may die."""
    with rigged() as rig:
        yield rig
    bury()
    assert "Traceback" not in capfd.readouterr().err


def keep_pace(rig: Rig, plan: StepPlan, must_end: bool) -> None:
    """Each token waits for the one before to be read; the fifth, if so, until nobody wants it: a
    sequence that runs on would end by its length."""
    hold_until(rig.has_read)
    if must_end and any(len(sequence.output_ids) == 4 for sequence in plan.sampled):
        hold_until(lambda: all(sequence.ended_by is not None for sequence in plan.sampled))


# With ALL_FAULTS=1 in the environment every fault is tried at every place; else of those that cost
# much and tell little a part.
IS_WHOLE = "ALL_FAULTS" in os.environ
# What these leave behind their own code alone could undo.
NEVER = {("submit", "half"), ("deadline", "half")}


def cases() -> Iterator[tuple[str, str]]:
    for number, (name, place) in enumerate(PLACES.items()):
        often = {"raises", "half" if number % 2 else "slow"}
        often |= {"no memory", DEADLY[number % 3]} if place.is_engine else {"panic"}
        for fault in FAULTS:
            is_panic = place.is_engine or fault not in DEADLY or fault == "panic"
            if (IS_WHOLE or fault in often) and is_panic and (name, fault) not in NEVER:
                yield name, fault


def is_deadly(name: str, fault: str) -> bool:
    if PLACES[name].is_deadly:
        return fault not in HARMLESS
    return PLACES[name].is_engine and fault in DEADLY


DEAD = [case for case in cases() if is_deadly(*case)]
ALIVE = [case for case in cases() if case not in DEAD]


def is_survived(place: Place, fault: str) -> bool:
    """The client gets its answer all the same."""
    runs_again = place.name == "forward" and fault == "no memory"
    return fault in HARMLESS or runs_again or not (place.is_told or place.is_cut)


@pytest.mark.parametrize("name, fault", ALIVE)
def test_fault_costs_its_own_request_at_most(
    rig: Rig, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PLACES[name]
    good = rig.ask(place.ask)
    trap = Trap(monkeypatch, place.owner, place.name)
    trap.set(FAULTS[fault], place.skip)
    survives = is_survived(place, fault)
    must_end = not (survives or place.is_engine or place.is_late or fault == "half")
    if not place.is_engine:
        rig.service.stub.change = lambda plan, logits: keep_pace(rig, plan, must_end)
    more = {"max_tokens": 12} if must_end and "max_tokens" in place.ask[1] else {}
    ending = rig.ask(place.ask, **more)
    trap.free()
    assert trap.has_sprung
    if survives:
        assert ending == good
    elif place.is_cut or (fault == "panic" and name == "last event"):
        assert not ending.is_whole or fault == "half"
    else:
        assert ending.is_whole
        is_break = fault == "panic" and place.is_direct
        assert ending.code == ("model_failure" if is_break else place.code)
    until(rig.is_quiet)
    if must_end:
        assert FinishReason.LENGTH not in {s.finish_reason for s in rig.sequences[1:]}
    if fault == "no memory":
        rig.recover_rows()
    rig.check(is_counted=place.is_counted or fault in HARMLESS, is_logged=name != "access log")


@pytest.mark.parametrize("name, fault", DEAD)
def test_engine_thread_that_dies_ends_all_with_an_error_and_the_process(
    mortal: Rig, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PLACES[name]
    trap = Trap(monkeypatch, place.owner, place.name)
    trap.set(FAULTS[fault], place.skip)
    ending = mortal.ask(place.ask)
    assert (ending.status, ending.code) == (500, "model_failure")
    assert mortal.service.bridge.ended.wait(60)  # which ends the process
    assert mortal.service.bridge.state is State.FAILED
    assert SECRET in str(mortal.service.bridge.failure)
    assert (mortal.get("/health/live"), mortal.get("/health/ready")) == (200, 503)
    assert mortal.ask().code == "not_ready"
    mortal.check()


# --- faults that stay -----------------------------------------------------------------------------


def break_decode(plan: StepPlan, logits: Any) -> None:
    if plan.decode:
        raise RuntimeError(SECRET)


def nan(plan: StepPlan, logits: Any) -> None:
    logits.fill(np.nan)


def infinite(plan: StepPlan, logits: Any) -> None:
    logits[:, 3] = np.inf


def out_of_memory(plan: StepPlan, logits: Any) -> None:
    raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize(
    "name", [n for n, p in PLACES.items() if p.is_engine and p.is_told and not p.is_deadly]
)
def test_place_that_fails_again_ends_readiness_until_a_step_is_good(
    rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "app.engine_thread._RETEST_SECONDS", 3600.0
    )  # not each place fails a self-test
    place = PLACES[name]
    trap = Trap(monkeypatch, place.owner, place.name)
    trap.set(FAULTS["raises"], is_for_ever=True)
    assert [rig.ask(place.ask).code for _ in range(2)] == ["model_failure"] * 2
    assert (rig.get("/health/live"), rig.get("/health/ready")) == (200, 503)
    trap.free()
    rig.check()


@pytest.mark.parametrize("change", [break_decode, nan, infinite, out_of_memory])
def test_model_that_fails_again_ends_readiness_until_a_step_is_good(rig: Rig, change: Any) -> None:
    rig.service.stub.change = change
    assert [rig.ask().code for _ in range(2)] == ["model_failure"] * 2
    assert (rig.get("/health/live"), rig.get("/health/ready")) == (200, 503)
    rig.check()
    rig.recover_rows()


def test_spoiled_rows_cost_the_others_nothing_and_readiness_stays(rig: Rig) -> None:
    spoiled = CODEC.encode("b")

    def spoil(plan: StepPlan, logits: Any) -> None:
        for row, sequence in enumerate(plan.sampled):
            if sequence.prompt_ids == spoiled:
                logits[row] = np.nan

    rig.service.stub.change = spoil
    good = rig.ask()
    with Client(rig.port) as bad, Client(rig.port) as other:
        rig.send(other, max_tokens=40)
        for _ in range(3):
            rig.send(bad, prompt="b")
            assert rig.read(bad).code == "model_failure"
        ending = rig.read(other)
    assert ending.text is not None and good.text is not None
    assert ending.text.startswith(good.text)
    rig.check()


@pytest.mark.parametrize("name", ["prefill", "decode", "commit", "mask collect", "moves"])
def test_engine_that_hangs_is_not_ready_and_goes_on_where_it_stood(
    rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, released = PLACES[name], threading.Event()
    good = rig.ask(place.ask)

    def hang(real: Callable[[], Any]) -> Any:
        hold_until(released.is_set)
        return real()

    trap = Trap(monkeypatch, place.owner, place.name)
    trap.set(hang, place.skip)
    with Client(rig.port) as client:
        rig.send(client, place.ask)
        until(lambda: trap.has_sprung)
        rig.clock.now += LIMIT_SECONDS + 1
        assert (rig.get("/health/live"), rig.get("/health/ready")) == (200, 503)
        assert rig.ask().code == "not_ready"
        released.set()
        assert rig.read(client) == good
    rig.check()


@pytest.mark.parametrize("name", ["encode off hub", "template", "grammar"])
def test_thread_off_the_hub_that_hangs_holds_up_no_other_and_ends_by_the_deadline(
    rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, released = PLACES[name], threading.Event()

    def hang(real: Callable[[], Any]) -> Any:
        released.wait(60)
        return real()

    trap = Trap(monkeypatch, place.owner, place.name)
    trap.set(hang)
    milliseconds = 50
    with Client(rig.port) as client:
        while not trap.has_sprung:  # on a busy machine the time may be over before
            rig.send_timed(client, place.ask, milliseconds)
            reading = gevent.spawn(rig.read, client)
            until(lambda: trap.has_sprung or reading.dead)  # noqa: B023  # called at once
            milliseconds *= 2
            if trap.has_sprung:
                assert rig.ask().status == 200
            assert reading.get().code == "deadline_exceeded"
    released.set()
    rig.check()


# --- clients --------------------------------------------------------------------------------------

AT: dict[str, Place] = {name: PLACES[name] for name in ("decode", "append", "delivery")} | {
    "detokenizer": PLACES["detokenizer"]
}
BODIES: dict[str, dict[str, Any]] = {
    "stream": {"stream": True},
    "n": {"n": 3},
    "n, stream": {"n": 3, "stream": True},
    "more than rows": {"n": NUM_ROWS + 2},
    "logprobs": {"logprobs": 2},
    "timed": {"timeout_ms": 20_000},
}


@pytest.fixture(params=AT)
def sprung(rig: Rig, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Trap:
    place = AT[request.param]
    trap = Trap(monkeypatch, place.owner, place.name)
    trap.set(FAULTS["raises"], place.skip)
    return trap


@pytest.mark.parametrize("body", BODIES)
def test_answer_of_every_form_ends_once(rig: Rig, sprung: Trap, body: str) -> None:
    ending = rig.ask(GENERATE, **BODIES[body])
    sprung.free()
    assert ending.is_whole
    assert ending.code in ("model_failure", "internal_error")
    rig.check()


def test_reader_that_is_late_finds_its_end(rig: Rig, sprung: Trap) -> None:
    with Client(rig.port, receive_buffer=4096) as client:
        rig.send(client, STREAM, max_tokens=50)
        until(lambda: sprung.has_sprung and not rig.sequences_run())
        assert rig.read(client).code in ("model_failure", "internal_error")
    rig.check()


def test_request_behind_it_on_the_connection_is_served(rig: Rig, sprung: Trap) -> None:
    with Client(rig.port) as client:
        rig.send(client)
        rig.send(client)
        assert rig.read(client).status == 500
        assert rig.read(client).status == 200
    rig.check()


@pytest.mark.parametrize("body", [{}, {"stream": True}], ids=["plain", "stream"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", AT)
def test_client_that_leaves_at_that_moment_costs_nothing(
    rig: Rig, way: str, name: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, has_left = AT[name], threading.Event()

    def leave() -> None:
        WAYS[way](client)
        has_left.set()

    def fail(real: Callable[[], Any]) -> Any:
        if place.is_engine:
            hold_until(has_left.is_set)
        else:
            leave()
        raise RuntimeError(SECRET)

    trap = Trap(monkeypatch, place.owner, place.name)
    trap.set(fail, place.skip)
    with Client(rig.port) as client:
        rig.send(client, max_tokens=40, **body)
        until(lambda: trap.has_sprung)
        if place.is_engine:
            leave()
        until(rig.is_quiet)
    rig.check(is_told=False)


@pytest.mark.parametrize("body", [{}, {"stream": True}], ids=["plain", "stream"])
def test_deadline_at_that_moment_ends_it_once(
    rig: Rig, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(real: Callable[[], Any]) -> Any:
        hold_until(lambda: rig.sequences[-1].ended_by is FinishReason.TIMEOUT)
        raise RuntimeError(SECRET)

    trap = Trap(monkeypatch, StubModel, "forward")
    trap.set(fail, 2)
    milliseconds = 50
    while not trap.has_sprung:  # on a busy machine the time may be over before
        ending = rig.ask(GENERATE, timeout_ms=milliseconds, **body)
        assert ending.is_whole
        assert ending.code in (None, "deadline_exceeded")  # with tokens and without
        until(rig.is_quiet)
        milliseconds *= 2
    rig.check()
