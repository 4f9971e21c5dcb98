"""The seam between hub and engine thread, with a real hub and a stub model."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest

from app.arena import Arena, KVLimits
from app.bridge import Bridge, State, TokenStream
from app.engine import Engine
from app.errors import DeadlineExceeded, InvalidRequest, NotReady, UnservableModel
from app.off_hub import Waiter
from app.sequence import Advance, FinishReason, Sequence

from .conftest import TinyModel
from .engines import StubModel, greedy, loaded_service, stub_answer, stub_engine

Started = Callable[..., tuple[Bridge, StubModel]]


@pytest.fixture
def started() -> Iterator[Started]:
    """Bridges on a stub engine, started and ready; ended after the test."""
    bridges: list[Bridge] = []

    def start(**shape: Any) -> tuple[Bridge, StubModel]:
        engine, model = stub_engine(**shape)
        bridge = Bridge(lambda: engine)
        bridges.append(bridge)
        bridge.start()
        wait_until(lambda: bridge.is_ready)
        model.plans.clear()  # those of the self-test
        return bridge, model

    yield start
    for bridge in bridges:
        bridge.request_stop()
        assert bridge.ended.wait(60)


def wait_until(condition: Callable[[], bool]) -> None:
    with gevent.Timeout(60):
        while not condition():
            gevent.sleep(0.001)


def submit(bridge: Bridge, sequence: Sequence) -> TokenStream:
    [stream], _ = bridge.submit([sequence])
    return stream


def advances_of(stream: TokenStream) -> list[Advance]:
    """All of them, to the end."""
    advances = stream.take()
    with gevent.Timeout(60):
        while not (advances and advances[-1].finish_reason is not None):
            gevent.sleep(0.001)
            advances += stream.take()
    return advances


def read(stream: TokenStream) -> list[int]:
    advances = advances_of(stream)
    assert [d.finish_reason is not None for d in advances] == [False] * (len(advances) - 1) + [True]
    return [advance.token_id for advance in advances if advance.token_id is not None]


def test_every_stream_gets_all_its_tokens_in_order(started: Started) -> None:
    bridge, _ = started(max_batch_size=8, max_model_len=300)
    prompts = [[i, i + 1] for i in range(60)]
    streams = [submit(bridge, greedy(str(p), p, 200)) for p in prompts]
    jobs = [gevent.spawn(read, stream) for stream in streams]
    assert [job.get() for job in jobs] == [stub_answer(p, 200) for p in prompts]


def test_model_runs_on_a_native_thread_of_its_own(started: Started) -> None:
    bridge, model = started()
    idents: set[int] = set()
    model.change = lambda plan, logits: idents.add(threading.get_ident())
    read(submit(bridge, greedy("a", [1], 3)))
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_hub_turns_while_the_model_runs(started: Started) -> None:
    """The step ends only after the hub has turned: a blocked hub would time the test out."""
    bridge, model = started()
    entered, hub_has_turned = threading.Event(), threading.Event()

    def block(plan: object, logits: object) -> None:
        entered.set()
        assert hub_has_turned.wait(60)

    model.change = block
    stream = submit(bridge, greedy("a", [1], 2))
    wait_until(entered.is_set)
    hub_has_turned.set()
    assert read(stream) == stub_answer([1], 2)


def test_abort_frees_the_row_of_a_running_sequence(started: Started) -> None:
    bridge, _ = started(max_batch_size=1, max_model_len=100_000)
    endless = submit(bridge, greedy("endless", [1], 90_000))
    wait_until(lambda: bool(endless.take()))
    endless.end(FinishReason.ABORT)
    assert read(submit(bridge, greedy("next", [2], 3))) == stub_answer([2], 3)


def test_sequences_of_one_request_share_the_event_that_tells_of_news(started: Started) -> None:
    bridge, _ = started()
    streams, arrival = bridge.submit([greedy("a", [1], 3), greedy("b", [2], 40)])
    with gevent.Timeout(60):
        assert arrival.wait()
    assert [read(stream) for stream in streams] == [stub_answer([1], 3), stub_answer([2], 40)]


def test_load_that_fails_is_told_and_refuses_requests() -> None:
    def load() -> Engine:
        raise ValueError("no such model")

    bridge = Bridge(load)
    bridge.start()
    assert bridge.ended.wait(60)
    assert (bridge.state, str(bridge.failure)) == (State.FAILED, "no such model")
    with pytest.raises(NotReady, match="failed"):
        submit(bridge, greedy("a", [1]))


def test_requests_are_refused_while_loading() -> None:
    go_on = threading.Event()
    engine, _ = stub_engine()

    def load() -> Engine:
        assert go_on.wait(60)
        return engine

    bridge = Bridge(load)
    bridge.start()
    with pytest.raises(NotReady, match="loading"):
        submit(bridge, greedy("a", [1]))
    go_on.set()
    wait_until(lambda: bridge.is_ready)
    bridge.request_stop()
    assert bridge.ended.wait(60)


def test_stop_while_loading_does_not_wait_for_the_load() -> None:
    go_on = threading.Event()
    engine, _ = stub_engine()

    def load() -> Engine:
        go_on.wait(60)
        return engine

    bridge = Bridge(load)
    bridge.start()
    bridge.request_stop()
    assert bridge.ended.is_set()
    go_on.set()
    wait_until(lambda: not bridge._thread.is_alive)


def test_hub_turns_between_deliveries_that_take_long(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is as fast as the hub would keep it for itself."""
    monkeypatch.setattr("app.bridge._DELIVERY_SECONDS", 0.0)
    bridge, _ = started(max_model_len=1000)
    turns: list[int] = []

    def deliver(advance: Advance) -> None:
        if not turns:  # the engine is ahead from the first token on
            wait_natively(lambda: len(bridge._outbox) > 100)
        turns.append(0)

    [stream], _ = bridge.submit([greedy("a", [1], 500)])
    stream.passage = deliver
    wait_until(lambda: bool(turns))
    assert len(bridge._outbox) > 50  # the hub has not done them all before this turn
    assert advances_of(stream)[-1].finish_reason is FinishReason.LENGTH
    assert len(turns) == 499


def wait_natively(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60
    while not condition() and time.monotonic() < give_up_at:
        time.sleep(0.001)


def test_death_of_the_engine_thread_ends_every_stream(started: Started) -> None:
    """A fault outside the model's own run, which the engine would survive."""
    bridge, model = started(max_batch_size=1, max_model_len=100_000)
    streams = [submit(bridge, greedy(str(i), [1], 90_000)) for i in range(3)]
    wait_until(lambda: bool(streams[0].take()))

    def die(plan: object, logits: object) -> None:
        raise SystemExit("killed")

    model.change = die
    for stream in streams:
        last = advances_of(stream)[-1]
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the server has stopped")
    assert bridge.state is State.FAILED
    assert not bridge.is_ready


def test_two_failed_steps_in_a_row_end_readiness_until_a_self_test_succeeds(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no request comes any more, for nobody sends one to a server that is not ready."""
    monkeypatch.setattr("app.engine_thread._RETEST_SECONDS", 0.001)
    bridge, model = started()

    def fail(plan: object, logits: object) -> None:
        raise RuntimeError

    model.change = fail
    for _ in range(2):
        advances_of(submit(bridge, greedy("a", [1], 1)))
    assert not bridge.is_ready
    num_tests = len(model.plans)
    wait_until(lambda: len(model.plans) > num_tests + 2)  # each of them fails
    assert not bridge.is_ready
    model.change = lambda plan, logits: None
    wait_until(lambda: bridge.is_ready)


def test_signal_after_a_failure_does_not_hide_it(started: Started) -> None:
    bridge, model = started()

    def die(plan: object, logits: object) -> None:
        raise SystemExit("killed")

    model.change = die
    advances_of(submit(bridge, greedy("a", [1], 1)))
    bridge.request_stop()
    assert bridge.state is State.FAILED


def test_stop_aborts_open_streams(started: Started) -> None:
    bridge, _ = started(max_batch_size=1, max_model_len=100_000)
    stream = submit(bridge, greedy("endless", [1], 90_000))
    wait_until(lambda: bool(stream.take()))
    bridge.request_stop()
    assert advances_of(stream)[-1].finish_reason is FinishReason.ABORT


def test_refusal_made_off_the_hub_is_raised_and_not_printed(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    """gevent's pool prints the trace of whatever is raised in it."""
    bridge, _ = started()

    def refuse() -> None:
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        bridge.off_hub(refuse)
    gevent.sleep(0)
    assert bridge.off_hub(threading.get_ident) != threading.get_ident()
    assert capsys.readouterr().err == ""


def test_wait_for_work_off_the_hub_ends_at_the_deadline(started: Started) -> None:
    bridge, _ = started()
    go_on = threading.Event()
    with pytest.raises(DeadlineExceeded):
        bridge.off_hub(
            lambda: go_on.wait(60), "grammar", Waiter(deadline_at=time.monotonic() + 0.01)
        )
    go_on.set()
    assert (
        bridge.off_hub(lambda: "done", "grammar", Waiter(deadline_at=time.monotonic() + 20))
        == "done"
    )


def test_work_off_the_hub_runs_on_native_threads_side_by_side(started: Started) -> None:
    """FR37: on greenlets, or one after the other, nobody would ever pass the barrier."""
    bridge, _ = started()
    barrier = threading.Barrier(4)

    def meet() -> int:
        barrier.wait(60)
        return threading.get_native_id()

    jobs = [gevent.spawn(bridge.off_hub, meet) for _ in range(8)]
    with gevent.Timeout(60):
        threads = {job.get() for job in jobs}
    assert len(threads) == 4
    assert threading.get_native_id() not in threads


def test_load_that_takes_too_long_fails_and_a_late_one_changes_nothing() -> None:
    go_on = threading.Event()
    engine, _ = stub_engine()

    def load() -> Engine:
        assert go_on.wait(60)
        return engine

    bridge = Bridge(load, max_load_seconds=0.01)
    bridge.pulse.enter("loading weights")
    bridge.start()
    assert bridge.ended.wait(60)
    assert bridge.state is State.FAILED
    assert "not done within 0.01 s (MAX_LOAD_SECONDS); it is at: loading weights" in str(
        bridge.failure
    )
    go_on.set()
    bridge.request_stop()
    wait_until(lambda: bool(bridge._outbox))  # the engine is there, and nobody is told
    assert not bridge.is_ready
    wait_until(lambda: not bridge._thread.is_alive)


def test_idle_engine_gives_its_memory_back(started: Started) -> None:
    arena = Arena(KVLimits(4, 64, 4, bytes_per_token=1, bytes_per_row=0), 10**6)
    bridge, _ = started(arena=arena)
    assert bridge._engine is not None
    bridge._engine._idle_seconds = 0.01
    for prompt in ([1] * 20, [2] * 20):
        assert read(submit(bridge, greedy("a", prompt, 20))) == stub_answer(prompt, 20)
        wait_until(lambda: arena.size == (1, 4))


def test_time_of_a_load_that_is_done_or_given_up_is_no_longer_limited() -> None:
    engine, _ = stub_engine()
    go_on = threading.Event()

    def load() -> Engine:
        assert go_on.wait(60)
        return engine

    done, stopped = Bridge(lambda: engine), Bridge(load)
    for bridge in (done, stopped):
        bridge.start()
    stopped.request_stop()
    wait_until(lambda: done.is_ready)
    for bridge, state in ((done, State.READY), (stopped, State.STOPPED)):
        bridge._give_up_load()
        assert (bridge.state, bridge.failure) == (state, None)
        bridge.request_stop()
    go_on.set()
    assert done.ended.wait(60)


def test_bridge_that_has_ended_is_not_kept_for_the_limit_of_its_load() -> None:
    engine, _ = stub_engine()
    bridge = Bridge(lambda: engine, max_load_seconds=1800)
    bridge.start()
    while not bridge.is_ready:
        gevent.sleep(0.001)
    bridge.request_stop()
    assert bridge.ended.wait(60)
    bridge.close()
    kept = weakref.ref(bridge)
    del bridge
    gevent.sleep(0)  # the timer's greenlet ends
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("ends", ["fails", "is done"])
def test_stop_in_the_load_stays_a_stop_however_the_load_ends(ends: str) -> None:
    go_on = threading.Event()
    engine, _ = stub_engine()

    def load() -> Engine:
        assert go_on.wait(60)
        if ends == "fails":
            raise UnservableModel("no such folder")
        return engine

    bridge = Bridge(load)
    bridge.start()
    bridge.request_stop()
    assert bridge.ended.is_set()
    go_on.set()
    wait_until(lambda: not bridge._thread.is_alive and not bridge._outbox)
    assert bridge.state is State.STOPPED
    bridge.close()


@pytest.mark.parametrize("attempt", range(5))
def test_start_ends_ready_and_a_stop_ends_its_thread(started: Started, attempt: int) -> None:
    bridge, _ = started()
    assert read(submit(bridge, greedy("a", [1], 3))) == stub_answer([1], 3)
    bridge.request_stop()
    wait_until(lambda: not bridge._thread.is_alive)


@pytest.mark.slow
def test_twenty_loads_of_a_real_model_end_ready(tiny_llama: TinyModel) -> None:
    """FR39: a load that hangs under gevent's loop would time this out."""
    for _ in range(20):
        assert loaded_service(tiny_llama.folder).bridge.state is State.STOPPED


def test_work_waits_for_its_like_only_and_never_begins_past_its_deadline(
    started: Started,
) -> None:
    bridge, _ = started()
    go_on = threading.Event()
    begun: list[str] = []
    busy = [gevent.spawn(bridge.off_hub, lambda: go_on.wait(60), "grammar") for _ in range(9)]
    gevent.sleep(0)
    with pytest.raises(DeadlineExceeded):
        bridge.off_hub(
            lambda: begun.append("late"), "grammar", Waiter(deadline_at=time.monotonic() + 0.01)
        )
    with gevent.Timeout(60):
        assert [bridge.off_hub(lambda: 1, kind) for kind in ("text", "template")] == [1, 1]
    go_on.set()
    assert all(job.get() for job in busy)
    assert begun == []
