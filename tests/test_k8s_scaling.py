"""deploy/k8s: what the autoscalers go by exists, and comes out of Prometheus as they expect it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from .manifests import K8S, Manifest, built, env_of, part, pod_of, read
from .metric_names import our_names_in, served, unknown
from .programs import needs
from .services import StubService, running
from .sockets import GET, Client, serving_of

# Two servers of one Deployment, of which one still loads and one is scraped by two jobs; and
# somebody else's.
SERIES = {
    '{namespace="prod",pod="serves"}': (1.5, 1),
    '{job="again",namespace="prod",pod="serves"}': (1.5, 1),
    '{namespace="prod",pod="loads"}': (0, 0),
    '{namespace="other",pod="serves"}': (9, 1),
}


@pytest.fixture(scope="module")
def autoscaler() -> Manifest:
    return part(built("overlays/hpa"), "HorizontalPodAutoscaler")


@pytest.fixture(scope="module")
def scaled_object() -> Manifest:
    return part(built("overlays/keda"), "ScaledObject")


@pytest.fixture(scope="module")
def rule() -> dict[str, Any]:
    [found] = read("monitoring/prometheus-adapter.yaml")["rules"]["custom"]
    return dict(found)


@pytest.fixture(scope="module")
def scrape() -> str:
    with running(StubService()) as service, serving_of(service) as server, Client(server) as client:
        reply = client.send(GET.replace(b"/health/live", b"/metrics")).read()
    assert reply.status == 200
    return reply.body.decode()


def evaluate(folder: Path, expression: str, expected: dict[str, float]) -> None:
    """Lets promtool evaluate `expression` over SERIES; fails where it is not as `expected`."""
    series = [
        {"series": name + labels, "values": f"{value}x8"}
        for labels, values in SERIES.items()
        for name, value in zip(("phi_serve_load_factor", "phi_serve_ready"), values, strict=True)
    ]
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    case = {"expr": expression, "eval_time": "1m", "exp_samples": samples}
    test = {"interval": "15s", "input_series": series, "promql_expr_test": [case]}
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [test]}))
    command = [needs("promtool"), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def filled(template: str, series: str, matchers: str) -> str:
    """A query of prometheus-adapter, with its placeholders filled in as it does."""
    for name, value in (("Series", series), ("LabelMatchers", matchers), ("GroupBy", "pod")):
        template = template.replace(f"<<.{name}>>", value)
    assert "<<" not in template
    return template


def test_every_metric_that_is_named_is_in_a_scrape(scrape: str, rule: dict[str, Any]) -> None:
    files = [file for file in K8S.rglob("*") if file.is_file()]
    names = set().union(*(our_names_in(file.read_text()) for file in files))
    assert names >= {"phi_serve_load_factor", "phi_serve_ready"}
    assert unknown(names, scrape, {rule["name"]["as"]}) == set()


def test_adapter_gives_the_autoscaler_its_metric(
    autoscaler: Manifest, rule: dict[str, Any]
) -> None:
    [metric] = autoscaler["spec"]["metrics"]
    assert metric["pods"]["metric"] == {"name": rule["name"]["as"]}
    series = rule["seriesQuery"].partition("{")[0]
    assert rule["name"]["matches"] == f"^{series}$"
    resources = rule["resources"]["overrides"]
    assert resources == {name: {"resource": name} for name in ("namespace", "pod")}


def test_name_of_the_adapters_metric_is_nobody_elses(scrape: str, rule: dict[str, Any]) -> None:
    assert rule["name"]["as"] not in served(scrape)


def test_adapter_finds_the_series_of_pods(tmp_path: Path, rule: dict[str, Any]) -> None:
    expected = {f"phi_serve_load_factor{labels}": value for labels, (value, _) in SERIES.items()}
    evaluate(tmp_path, rule["seriesQuery"], expected)


def test_adapter_has_a_value_for_pods_that_are_ready_only(
    tmp_path: Path, rule: dict[str, Any]
) -> None:
    matchers = 'namespace="prod",pod=~"loads|serves"'
    query = filled(rule["metricsQuery"], "phi_serve_load_factor", matchers)
    evaluate(tmp_path, query, {'{pod="serves"}': 1.5})


def test_keda_asks_for_the_sum_over_pods_that_are_ready(
    tmp_path: Path, scaled_object: Manifest
) -> None:
    [trigger] = scaled_object["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    assert query.count('namespace="default"') == 1
    evaluate(tmp_path, query.replace('"default"', '"prod"'), {"{}": 1.5})


def test_scaled_object_is_what_keda_takes(autoscaler: Manifest, scaled_object: Manifest) -> None:
    """KEDA's schema is a CRD that is not at hand; behavior is checked as an autoscaler's."""
    spec = scaled_object["spec"]
    assert (scaled_object["apiVersion"], spec["scaleTargetRef"]) == (
        "keda.sh/v1alpha1",
        {"name": part(built("overlays/keda"), "Deployment")["metadata"]["name"]},
    )
    names = {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"}
    assert spec.keys() == names
    assert spec["advanced"].keys() == {"horizontalPodAutoscalerConfig"}
    config = spec["advanced"]["horizontalPodAutoscalerConfig"]
    assert config.keys() == {"behavior"}
    as_autoscaler = autoscaler | {"spec": autoscaler["spec"] | config}
    kubernetes_validate.validate(as_autoscaler, "1.37", strict=True)
    [trigger] = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
    needed = {"serverAddress", "query", "threshold", "ignoreNullValues"}
    assert trigger["metadata"].keys() == needed
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_both_autoscalers_have_the_same_target_bounds_and_pace(
    autoscaler: Manifest, scaled_object: Manifest
) -> None:
    hpa, keda = autoscaler["spec"], scaled_object["spec"]
    [metric], [trigger] = hpa["metrics"], keda["triggers"]
    target = metric["pods"]["target"]["averageValue"]
    assert float(target.removesuffix("m")) / 1000 == float(trigger["metadata"]["threshold"])
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (
        keda["minReplicaCount"],
        keda["maxReplicaCount"],
    )
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]


@pytest.mark.parametrize("overlay", ["hpa", "keda"])
def test_deployment_leaves_the_number_of_pods_to_the_autoscaler(overlay: str) -> None:
    """Else each `kubectl apply` would set it back."""
    deployment = part(built(f"overlays/{overlay}"), "Deployment")
    assert "replicas" not in deployment["spec"]
    assert part(built("base"), "Deployment")["spec"]["replicas"] == 2


def test_fewest_pods_are_more_than_the_budget_takes(autoscaler: Manifest) -> None:
    budget = part(built("overlays/hpa"), "PodDisruptionBudget")["spec"]
    assert autoscaler["spec"]["minReplicas"] > budget["maxUnavailable"]


def test_adapter_and_keda_ask_the_same_prometheus(scaled_object: Manifest) -> None:
    adapter = read("monitoring/prometheus-adapter.yaml")["prometheus"]
    [trigger] = scaled_object["spec"]["triggers"]
    assert trigger["metadata"]["serverAddress"] == adapter["url"]
    [source] = part(built("base"), "NetworkPolicy")["spec"]["ingress"][1]["from"]
    [namespace] = source["namespaceSelector"]["matchLabels"].values()
    assert f".{namespace}.svc" in adapter["url"]


def test_prometheus_takes_the_job(tmp_path: Path) -> None:
    """Debian's is built without Kubernetes' discovery: pods are listed by hand."""
    config = read("monitoring/prometheus.yaml")
    [job] = config["scrape_configs"]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    job["static_configs"] = [{"targets": ["10.0.0.1:9090"]}]
    file = tmp_path / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [needs("promtool"), "check", "config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_job_scrapes_the_port_of_the_metrics_and_names_namespace_and_pod() -> None:
    [job] = read("monitoring/prometheus.yaml")["scrape_configs"]
    rules = job["relabel_configs"]
    assert job["job_name"] == "phi-serve"  # which deploy/prometheus/alerts.yml asks for
    kept = {rule["source_labels"][0]: rule["regex"] for rule in rules if "regex" in rule}
    labels = part(built("base"), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert kept["__meta_kubernetes_pod_label_app_kubernetes_io_name"] in labels.values()
    [server] = pod_of(built("base"))["containers"]
    ports = {port["name"]: str(port["containerPort"]) for port in server["ports"]}
    assert ports[kept["__meta_kubernetes_pod_container_port_name"]] == env_of(server)["OPS_PORT"]
    assert {rule["target_label"] for rule in rules if "target_label" in rule} == {
        "namespace",
        "pod",
    }
