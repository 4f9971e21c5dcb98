"""The autoscaler of deploy/k8s under a step load, and the formula and servers that show it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulate_hpa
from click.testing import CliRunner
from hpa_cluster import TICK_SECONDS, Cluster, Pod, Server
from hpa_formula import Autoscaler, quantity
from simulate_hpa import KEDA, STEP_AT, Setup, main, measure, simulate, turns

SEEDS = range(2)
LOADS = (45, 180)  # seconds that a server needs for its model


def autoscaler(**behavior: Any) -> Autoscaler:
    """2 to 10 pods, target 0.5, no windows, ten pods at once unless `behavior` says otherwise."""
    rules = {
        "stabilizationWindowSeconds": 0,
        "policies": [{"type": "Pods", "value": 10, "periodSeconds": 60}],
    }
    metric = {"target": {"type": "AverageValue", "averageValue": "500m"}}
    spec = {
        "minReplicas": 2,
        "maxReplicas": 10,
        "metrics": [{"type": "Pods", "pods": metric}],
        "behavior": {name: rules | behavior.get(name, {}) for name in ("scaleUp", "scaleDown")},
    }
    return Autoscaler.of({"spec": spec})


# --- the formula ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "starting", "wanted"),
    [
        ([0.5, 0.5], 0, 2),
        ([0.55, 0.55], 0, 2),  # within the tolerance of 10 %
        ([0.45, 0.45], 0, 2),
        ([0.6, 0.6], 0, 3),  # ceil(2 * 1.2)
        ([3.0, 0.0], 0, 6),
        ([0.1, 0.1], 0, 1),
        ([None, None], 0, 2),  # says nothing
        ([1.0, None], 0, 2),  # who has no value counts as idle: 0.5 on average
        ([2.0, None], 0, 4),
        ([2.0], 1, 4),  # and so does a pod without a container, on the way up
        ([0.2, None], 0, 2),  # on the way down it counts as just right: ceil(1.4)
        ([0.2], 1, 1),
    ],
)
def test_metric_asks_for_pods_as_the_controller_computes(
    values: list[float | None], starting: int, wanted: int
) -> None:
    assert autoscaler().wanted(len(values) + starting, values, starting) == wanted


def test_keda_asks_by_the_sum_over_all_pods() -> None:
    scaler = replace(autoscaler(), is_external=True)
    assert scaler.wanted(4, [2.0, None], 2) == 4
    assert scaler.wanted(2, [2.0, None], 0) == 4
    assert scaler.wanted(4, [0.2, 0.2], 0) == 1
    assert scaler.wanted(2, [0.5, 0.55], 0) == 2
    assert scaler.wanted(3, [None], 2) == 3


def decisions(scaler: Autoscaler, asked: list[float], replicas: int = 2) -> list[int]:
    """The number of pods, every 15 s, where all pods have these values."""
    found = []
    for number, value in enumerate(asked):
        replicas = scaler.decide(15.0 * number, replicas, [value] * replicas, 0)
        found.append(replicas)
    return found


def test_up_goes_to_the_least_that_was_asked_for_in_the_window() -> None:
    scaler = autoscaler(scaleUp={"stabilizationWindowSeconds": 30})
    assert decisions(scaler, [0.5, 1.0, 0.5, 1.0, 1.0, 1.0]) == [2, 2, 2, 2, 4, 4]


def test_down_goes_to_the_most_that_was_asked_for_in_the_window() -> None:
    scaler = autoscaler(scaleDown={"stabilizationWindowSeconds": 30})
    assert decisions(scaler, [0.1, 0.1, 0.3, 0.1], replicas=6) == [6, 6, 4, 4]


def test_policies_bound_what_a_period_adds() -> None:
    policies = [
        {"type": "Percent", "value": 50, "periodSeconds": 60},
        {"type": "Pods", "value": 1, "periodSeconds": 30},
    ]
    up = {"policies": policies, "selectPolicy": "Max"}
    assert decisions(autoscaler(scaleUp=up), [9.0] * 6) == [3, 3, 4, 4, 5, 5]
    slow = up | {"selectPolicy": "Min"}
    assert decisions(autoscaler(scaleUp=slow), [9.0] * 6) == [3, 3, 3, 3, 4, 4]
    off = {"selectPolicy": "Disabled"}
    assert decisions(autoscaler(scaleUp=off), [9.0] * 3) == [2, 2, 2]


def test_policies_bound_what_a_period_removes() -> None:
    down = {"policies": [{"type": "Percent", "value": 50, "periodSeconds": 60}]}
    assert decisions(autoscaler(scaleDown=down), [0.01] * 5, replicas=9) == [4, 4, 4, 4, 2]


def test_quantities() -> None:
    assert (quantity("600m"), quantity("2"), quantity(0.1)) == (0.6, 2.0, 0.1)


# --- the servers ----------------------------------------------------------------------------------


def test_one_request_of_sixteen_rows_is_a_tenth_at_most_though_it_keeps_the_model_busy() -> None:
    pod = Pod(Server(num_rows=16), 0)
    pod.ask(0, 1000)
    pod.tick(0)
    assert pod.load_factor() <= 0.1
    assert pod.busy_ratio() > 0.9


def test_queue_behind_full_rows_is_more_than_one() -> None:
    pod = Pod(Server(num_rows=16), 0)
    for _ in range(32):
        pod.ask(0, 1000)
    pod.tick(0)
    assert pod.load_factor() > 1


def test_rate_of_a_server_is_what_its_rows_end_at() -> None:
    server = Server(num_rows=16, answer_tokens=100)
    pod = Pod(server, 0)
    for _ in range(2000):
        pod.ask(0, 100)
    seconds = 100
    begun = sum(len(pod.tick(number * TICK_SECONDS)) for number in range(int(seconds / 0.5)))
    assert begun / seconds == pytest.approx(server.requests_per_second(1.0), rel=0.15)


def test_pod_that_leaves_is_asked_no_more_and_ends_what_it_has() -> None:
    server = Server(drain_seconds=30)
    cluster = Cluster(server, 2, np.random.default_rng(0))
    cluster.tick(0, 20)
    cluster.scale(1, 1)
    [leaving] = [pod for pod in cluster.pods if pod.is_leaving]
    before = leaving.num_open
    cluster.tick(1, 200)
    assert 0 < leaving.num_open <= before
    for number in range(2, 64):
        cluster.tick(number / 2, 0)
    assert leaving not in cluster.pods
    assert cluster.num_asked_now(40) == 1


# --- the step load --------------------------------------------------------------------------------


OURS = Setup.of()


def once(setup: Setup, load_seconds: int, signal: str, seed: int) -> dict[str, float]:
    server = replace(Server(), load_seconds=load_seconds)
    return measure(simulate(setup, server, signal, seed), setup, server)


@cache
def seen(load_seconds: int) -> list[dict[str, float]]:
    return [once(OURS, load_seconds, OURS.signal, seed) for seed in SEEDS]


@pytest.mark.parametrize("load_seconds", LOADS)
def test_step_load_is_followed_without_flapping(load_seconds: int) -> None:
    for run in seen(load_seconds):
        assert run["turns"] == 1  # up with the load, then down: no pod is removed to be added again
        assert run["first_seconds"] <= 90
        # One doubling, and a second one a minute later: 2, 4, 8.
        assert run["enough_seconds"] <= 90 + 60 + 20 + load_seconds
        assert run["back_seconds"] <= 1300


def test_fewest_pods_are_enough_for_low_load() -> None:
    least = Autoscaler.of(OURS.autoscaler).min_replicas
    assert all(run["pods_at_low_load"] == least for run in seen(45))


def test_keda_does_not_flap_either() -> None:
    run = once(OURS, 45, KEDA, SEEDS[0])
    assert run["turns"] == 1
    assert run["enough_seconds"] <= seen(45)[0]["enough_seconds"] + 60


def test_clamped_signal_takes_longer() -> None:
    clamped = once(OURS, 45, "phi_serve_saturation_ratio", SEEDS[0])
    assert clamped["enough_seconds"] > seen(45)[0]["enough_seconds"]


def test_busy_model_is_the_wrong_signal() -> None:
    """FR51: one user keeps it busy, so it asks for pods that nobody needs, and keeps them."""
    assert OURS.signal != "phi_serve_engine_busy_ratio"
    run = once(OURS, 45, "phi_serve_engine_busy_ratio", SEEDS[0])
    assert run["pods_at_low_load"] > 2
    assert math.isinf(run["back_seconds"])


def test_flapping_would_be_seen() -> None:
    """The same autoscaler without the manifest's windows."""
    manifest = copy.deepcopy(OURS.autoscaler)
    for rules in manifest["spec"]["behavior"].values():
        rules["stabilizationWindowSeconds"] = 0
    assert once(replace(OURS, autoscaler=manifest), 45, OURS.signal, SEEDS[0])["turns"] > 1


def test_turns_are_changes_of_direction() -> None:
    assert turns([2, 2, 4, 4, 8, 8, 7, 6, 6, 2]) == 1
    assert turns([2, 3, 2, 3]) == 2
    assert turns([2, 2]) == 0


def test_script_writes_table_json_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate_hpa, "END_AT", STEP_AT + 200)
    monkeypatch.setattr(simulate_hpa, "DROP_AT", STEP_AT + 150)
    plot, json_file = tmp_path / "hpa.png", tmp_path / "hpa.json"
    options = ["--seeds", "1", "--load-seconds", "20", "--plot", str(plot)]
    result = CliRunner().invoke(main, [*options, "--json", str(json_file)])
    assert result.exit_code == 0, result.output
    assert "| `phi_serve_load_factor` | 20 | 2 |" in result.stdout
    assert json_file.read_text() == result.stdout.splitlines()[-1] + "\n"
    assert plot.read_bytes().startswith(b"\x89PNG")
