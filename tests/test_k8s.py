"""deploy/k8s: what kustomize builds is valid, safe, and agrees with the server's settings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from app.config import OPTIONS
from app.routes import ROUTES

from .live import ROOT
from .manifests import BUILDS, K8S, OVERLAYS, Manifest, build, built, env_of, part, pod_of

DEFAULTS = {str(option.envvar): option.default for option in OPTIONS}
OLDEST, NEWEST = "1.31", "1.37"  # that the manifests are for, and that is known
DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()


@pytest.fixture(scope="module")
def combined(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """The example of docs/kubernetes.md: a GPU, the model in an image, autoscaled."""
    [example] = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.S)
    copy = tmp_path_factory.mktemp("deploy") / "k8s"
    shutil.copytree(K8S, copy)
    folder = copy / "overlays" / "combined"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(example)
    return build(folder)


@pytest.fixture(params=[*BUILDS, "combined"])
def parts(request: pytest.FixtureRequest) -> list[Manifest]:
    if request.param == "combined":
        found: list[Manifest] = request.getfixturevalue("combined")
        return found
    return built(request.param)


@pytest.fixture
def pod(parts: list[Manifest]) -> Manifest:
    return pod_of(parts)


@pytest.fixture
def server(pod: Manifest) -> Manifest:
    [container] = pod["containers"]
    return dict(container)


@pytest.fixture
def env(server: Manifest) -> dict[str, str]:
    return env_of(server)


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_manifests_are_strictly_valid(parts: list[Manifest]) -> None:
    for each in parts:
        if each["kind"] != "ScaledObject":  # a CRD of KEDA's: test_k8s_scaling.py
            kubernetes_validate.validate(each, NEWEST, strict=True)


@pytest.mark.parametrize("overlay", ["base", "combined"])
def test_old_clusters_take_them_too(overlay: str, request: pytest.FixtureRequest) -> None:
    """All kinds and fields are in these two."""
    parts = built("base") if overlay == "base" else request.getfixturevalue("combined")
    for each in parts:
        kubernetes_validate.validate(each, OLDEST, strict=True)


def test_validation_finds_a_misspelt_field() -> None:
    service = part(built("base"), "Service")
    with pytest.raises(kubernetes_validate.ValidationError, match="tragetPort"):
        ports = [{"port": 80, "tragetPort": "http"}]
        spec = service["spec"] | {"ports": ports}
        kubernetes_validate.validate(service | {"spec": spec}, NEWEST, strict=True)


def test_every_file_is_part_of_what_is_built() -> None:
    """A manifest that no kustomization names would be checked by nobody."""
    named: set[Path] = set()
    for file in K8S.rglob("kustomization.yaml"):
        content = yaml.safe_load(file.read_text())
        paths = [patch["path"] for patch in content.get("patches", []) if "path" in patch]
        for path in [*paths, *content.get("resources", []), *content.get("components", [])]:
            target = (file.parent / path).resolve()
            assert target.exists(), f"{file} names {path}"
            named.add(target)
    files = set(K8S.rglob("*.yaml")) - set(K8S.rglob("kustomization.yaml"))
    assert files - named == set((K8S / "monitoring").iterdir())


def test_document_names_all_folders_and_no_others() -> None:
    folders = {"base", "monitoring", "components", *(f"overlays/{name}" for name in OVERLAYS)}
    table = DOCUMENT.split("| folder | what |\n| --- | --- |\n")[1].split("\n\n")[0]
    named = " ".join(line.split("|")[1] for line in table.splitlines())
    assert set(re.findall(r"`([\w/]+)`", named)) == folders
    for component in (K8S / "components").iterdir():
        assert f"`{component.name}`" in table


def test_environment_is_settings_that_there_are(env: dict[str, str]) -> None:
    assert env.keys() <= DEFAULTS.keys()
    assert int(env["OPS_PORT"]) != int(env["PORT"])


def test_grace_period_is_longer_than_the_drain(pod: Manifest, env: dict[str, str]) -> None:
    seconds = int(env["PRE_DRAIN_SECONDS"]) + int(env["DRAIN_SECONDS"]) + 5
    assert pod["terminationGracePeriodSeconds"] >= seconds
    assert int(env["PRE_DRAIN_SECONDS"]) >= 5


def test_probes_ask_health_on_its_port_with_patience(server: Manifest, env: dict[str, str]) -> None:
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert (ports["http"], ports["ops"]) == (int(env["PORT"]), int(env["OPS_PORT"]))
    paths = {route.path for route in ROUTES}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = server[kind]
        assert probe["httpGet"]["path"] in paths
        assert probe["httpGet"]["port"] == "ops"
        assert 2 <= probe["timeoutSeconds"] <= probe["periodSeconds"]
        assert probe["failureThreshold"] >= 2
    assert server["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert server["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert server["livenessProbe"]["failureThreshold"] >= 6


def test_start_may_take_as_long_as_the_load(server: Manifest, env: dict[str, str]) -> None:
    probe = server["startupProbe"]
    assert probe["httpGet"]["path"] == "/health/ready"
    seconds = probe["failureThreshold"] * probe["periodSeconds"]
    assert seconds > int(env["MAX_LOAD_SECONDS"]) + 2 * probe["periodSeconds"]


def test_rollout_waits_for_as_long_as_the_start(parts: list[Manifest], server: Manifest) -> None:
    """Else a load that is slow, but good, is told to have failed."""
    probe = server["startupProbe"]
    seconds = probe["failureThreshold"] * probe["periodSeconds"]
    assert part(parts, "Deployment")["spec"]["progressDeadlineSeconds"] > seconds


def test_endpoint_is_gone_before_requests_are_refused(server: Manifest) -> None:
    """At the end only the signal counts; where a server is not ready any more it takes two probes,
    and requests get a 503 meanwhile."""
    probe = server["readinessProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] <= 10


def test_pod_is_as_restricted_as_it_can_be(pod: Manifest) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        assert not pod.get(name)
    user = pod["securityContext"]
    assert user["runAsNonRoot"] is True
    assert user["runAsUser"] >= 10000
    assert user["runAsGroup"] >= 10000
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any("hostPath" in volume for volume in pod["volumes"])
    for container in containers(pod):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context.get("privileged")
        assert context.keys() <= {
            "allowPrivilegeEscalation",
            "readOnlyRootFilesystem",
            "capabilities",
        }


def test_images_have_a_version(pod: Manifest) -> None:
    for container in containers(pod):
        _, _, tag = container["image"].partition(":")
        assert tag and tag != "latest"


def test_resources_are_bounded(pod: Manifest) -> None:
    for container in containers(pod):
        asked, most = container["resources"]["requests"], container["resources"]["limits"]
        assert asked.keys() == most.keys() >= {"cpu", "memory", "ephemeral-storage"}


def test_server_has_the_cpus_that_its_threads_are_for(server: Manifest) -> None:
    """Threads follow the limit, and without one the node's number."""
    resources = server["resources"]
    assert resources["requests"]["cpu"] == resources["limits"]["cpu"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_only_a_folder_for_temporary_files_can_be_written(pod: Manifest, server: Manifest) -> None:
    mounts = {mount["name"]: mount for mount in server["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert [name for name, mount in mounts.items() if not mount.get("readOnly")] == ["tmp"]
    assert mounts["tmp"]["mountPath"] == "/tmp"
    assert "sizeLimit" in volumes["tmp"]["emptyDir"]


def test_keys_and_model_are_mounted_where_they_are_read(
    pod: Manifest, server: Manifest, env: dict[str, str]
) -> None:
    mounts = {mount["name"]: mount for mount in server["volumeMounts"]}
    assert env["API_KEYS_FILE"] == f"{mounts['keys']['mountPath']}/keys.json"
    assert "subPath" not in mounts["keys"]  # Kubernetes would never update it
    assert env["MODEL_PATH"].startswith(mounts["models"]["mountPath"] + "/")


def test_model_comes_by_a_claim_that_there_is_or_by_an_image(
    parts: list[Manifest], pod: Manifest
) -> None:
    claims = [each for each in parts if each["kind"] == "PersistentVolumeClaim"]
    [volume] = [each for each in pod["volumes"] if each["name"] == "models"]
    if "initContainers" in pod:
        [init] = pod["initContainers"]
        assert {"name": "models", "mountPath": init["command"][-1]} in init["volumeMounts"]
        assert "emptyDir" in volume and not claims
    else:
        [claim] = claims
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_everything_selects_the_pods(parts: list[Manifest]) -> None:
    deployment = part(parts, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        part(parts, "Service")["spec"]["selector"],
        part(parts, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        part(parts, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)


def test_service_does_not_offer_health_and_metrics(parts: list[Manifest]) -> None:
    [port] = part(parts, "Service")["spec"]["ports"]
    assert port["targetPort"] == "http"


def test_nothing_goes_out_and_metrics_go_to_prometheus_only(parts: list[Manifest]) -> None:
    spec = part(parts, "NetworkPolicy")["spec"]
    assert sorted(spec["policyTypes"]) == ["Egress", "Ingress"]
    assert spec["egress"] == []
    rules = {rule["ports"][0]["port"]: rule["from"] for rule in spec["ingress"]}
    [source] = rules["ops"]
    assert source["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "monitoring"
    }
    assert rules.keys() == {"http", "ops"}


def test_annotations_tell_where_the_metrics_are(parts: list[Manifest], env: dict[str, str]) -> None:
    found: dict[str, Any] = part(parts, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert found["prometheus.io/port"] == env["OPS_PORT"]
    assert found["prometheus.io/path"] in {route.path for route in ROUTES}


def test_budget_lets_a_node_be_drained_whatever_the_number_of_pods(parts: list[Manifest]) -> None:
    spec = part(parts, "PodDisruptionBudget")["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


@pytest.mark.parametrize(
    ("overlay", "device", "arch"),
    [("cpu", "cpu", "amd64"), ("arm64", "cpu", "arm64"), ("gpu", "cuda", "amd64")],
)
def test_overlay_is_for_its_device(overlay: str, device: str, arch: str) -> None:
    pod = pod_of(built(f"overlays/{overlay}"))
    [server] = pod["containers"]
    assert env_of(server)["DEVICE"] == device
    assert pod["nodeSelector"] == {"kubernetes.io/arch": arch}
    gpus = server["resources"]["limits"].get("nvidia.com/gpu")
    assert gpus == ("1" if device == "cuda" else None)


def test_gpu_overlay_needs_no_spare_gpu_for_an_update() -> None:
    strategy = part(built("overlays/gpu"), "Deployment")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
