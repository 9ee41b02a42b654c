"""The Kubernetes files in `configs/k8s`: valid by schema, understood by the programs they start, and consistent."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import yaml

from pdserve.base.env import CONTROL_TOKEN, WORKER_PROOF_KEY
from pdserve.config.groups import ServerConfig
from pdserve.errors import ConfigError
from pdserve.http.credentials import ADMIN_API_KEY, API_KEY
from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.config.discovery import matches
from pdserve.server.sglang_api import health
from tests.rules.deploy_kit import (
    DISCOVERING,
    K8S,
    ON_RDMA,
    OVERLAYS,
    WORKER_INDEX,
    Pod,
    drain_s,
    environment,
    of_kind,
    parse_command,
    pod_command,
    pods,
    rendered,
    router_paths,
    server_paths,
)
from tests.rules.deploy_schemas import CUSTOM

API_KEYS = (API_KEY, ADMIN_API_KEY)

OLDEST_KUBERNETES = "1.30"
ALL = ("base", *OVERLAYS)
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def server_of(pod: Pod, overlay: str) -> ServerConfig:
    config = parse_command(pod_command(pod, rendered(overlay)))
    assert isinstance(config, ServerConfig)
    return config


def router_of(overlay: str) -> RouterConfig:
    (pod,) = (pod for pod in pods(rendered(overlay)) if not pod.is_server)
    config = parse_command(pod_command(pod, rendered(overlay)))
    assert isinstance(config, RouterConfig)
    return config


@functools.cache
def kubernetes_validate() -> Any:
    """The package `kubernetes_validate`, made to read each of its schema files of several megabytes once."""
    module = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    module.utils.schema_contents = functools.cache(module.utils.schema_contents)
    return module


def check_schema(document: dict[str, Any]) -> None:
    """Raise unless a document is what its kind's schema says; of custom resources the pod templates too."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    validate = kubernetes_validate()
    kind = document["kind"]
    if kind not in CUSTOM:
        for version in (OLDEST_KUBERNETES, validate.latest_version()):
            validate.validate(document, version, strict=True)
        return
    jsonschema.Draft202012Validator(CUSTOM[kind]).validate(document)
    for name, template in document["spec"].get("leaderWorkerTemplate", {}).items():
        if name in ("leaderTemplate", "workerTemplate"):
            metadata = {"name": "pod", **template["metadata"]}
            check_schema({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})


def test_files_that_kustomizations_name_exist_and_are_yaml() -> None:
    named: set[str] = set()
    for path in sorted(K8S.rglob("*.yaml")):
        documents = list(yaml.safe_load_all(path.read_text()))
        assert documents and all(documents), path
        if path.name == "kustomization.yaml":
            (content,) = documents
            files = [*content.get("resources", ()), *content.get("components", ()), *content.get("configurations", ())]
            files += [patch["path"] for patch in content.get("patches", ()) if "path" in patch]
            files += [name for maker in content.get("configMapGenerator", ()) for name in maker.get("envs", ())]
            assert files, path
            missing = [name for name in files if not (path.parent / name).exists()]
            assert missing == [], path
            named |= {str((path.parent / name).resolve()) for name in files}
    unused = [str(p) for p in K8S.rglob("*") if p.is_file() and p.name != "kustomization.yaml" and str(p) not in named]
    assert unused == []


@pytest.mark.parametrize("overlay", ALL)
def test_every_document_is_valid_by_its_schema(overlay: str) -> None:
    for document in rendered(overlay):
        check_schema(document)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "sise"), 2),
        ("LeaderWorkerSet", ("spec", "startupPolicy"), "LeaderFirst"),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "containerz"), []),
        ("PodMonitor", ("spec", "podMetricsEndpoints"), [{"port": "http", "interval": "15 seconds"}]),
        ("Deployment", ("spec", "replica"), 2),
        ("ScaledObject", ("spec", "maxReplicas"), 2),
        ("ScaledObject", ("spec", "triggers", 0, "metadata", "threshold"), "four"),
    ],
)
def test_the_schemas_find_mistakes(kind: str, path: tuple[str | int, ...], value: object) -> None:
    document = copy.deepcopy(of_kind(rendered("autoscaled"), kind)[0])
    check_schema(document)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(Exception, match=r"not allowed|not one of|does not match"):
        check_schema(document)


@pytest.mark.parametrize("overlay", ALL)
def test_every_command_line_is_understood(overlay: str) -> None:
    found = pods(rendered(overlay))
    assert {pod.labels["app.kubernetes.io/component"] for pod in found} == {"prefill", "decode", "router"}
    for pod in found:
        config = parse_command(pod_command(pod, rendered(overlay)))
        if isinstance(config, ServerConfig):
            assert config.disagg.disaggregation_mode == pod.labels["app.kubernetes.io/component"], pod.name
            assert (config.parallel.nnodes, config.parallel.node_rank) == (pod.size, pod.index), pod.name


def test_a_flag_that_does_not_exist_would_be_found() -> None:
    pod = next(pod for pod in pods(rendered("laptop")) if pod.is_server)
    with pytest.raises(ConfigError, match="there is no such flag"):
        parse_command([*pod_command(pod, rendered("laptop")), "--num-nodes=1"])


@pytest.mark.parametrize("overlay", sorted(set(ALL) - set(DISCOVERING)))
def test_the_router_knows_exactly_the_servers_that_are_made(overlay: str) -> None:
    expected = set()
    for pod in pods(rendered(overlay)):
        if not pod.is_server or pod.index:
            continue
        config, name = server_of(pod, overlay), pod.owner["metadata"]["name"]
        prefill = config.disagg.disaggregation_mode == "prefill"
        port = config.disagg.disaggregation_bootstrap_port if prefill else None
        for replica in range(pod.owner["spec"]["replicas"]):
            url = f"http://{name}-{replica}.{name}:{config.serving.port}"
            expected.add((WorkerRole.PREFILL if prefill else WorkerRole.DECODE, url, port))
    assert {(spec.role, spec.url, spec.bootstrap_port) for spec in router_of(overlay).workers} == expected


@pytest.mark.parametrize("overlay", DISCOVERING)
def test_a_router_that_discovers_servers_selects_the_first_pod_of_each_group_by_its_role(overlay: str) -> None:
    router = router_of(overlay)
    assert router.discovery is not None and router.workers == ()
    for pod in pods(rendered(overlay)):
        in_group = pod.owner["kind"] == "LeaderWorkerSet"
        for index in ("0", "1") if in_group and WORKER_INDEX in str(router.discovery) else (str(pod.index),):
            labels = pod.labels | ({WORKER_INDEX: index} if in_group else {})
            selectors = {"prefill": router.discovery.prefill_selector, "decode": router.discovery.decode_selector}
            found = [role for role, selector in selectors.items() if matches(selector, labels)]
            assert found == ([labels["app.kubernetes.io/component"]] if pod.is_server and index == "0" else []), labels
        if pod.is_server:
            assert server_of(pod, overlay).serving.port == router.discovery.port
            assert router.discovery.namespace == pod.owner["metadata"]["namespace"]


@pytest.mark.parametrize("overlay", DISCOVERING)
def test_the_routers_service_account_may_watch_pods_of_its_namespace_and_nothing_else(overlay: str) -> None:
    (role,), (binding,), (account,) = (of_kind(rendered(overlay), k) for k in ("Role", "RoleBinding", "ServiceAccount"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == account["metadata"]["name"] and account["automountServiceAccountToken"] is False
    for pod in pods(rendered(overlay)):
        assert pod.spec.get("serviceAccountName") == (None if pod.is_server else account["metadata"]["name"])


def test_keda_scales_each_role_and_a_new_apply_keeps_its_number() -> None:
    documents = rendered("autoscaled")
    servers = {one["metadata"]["name"]: one["spec"] for one in of_kind(documents, "LeaderWorkerSet")}
    scaled = {one["spec"]["scaleTargetRef"]["name"]: one["spec"] for one in of_kind(documents, "ScaledObject")}
    assert scaled.keys() == servers.keys()
    assert all("replicas" not in spec for spec in servers.values())
    for name, spec in scaled.items():
        assert spec["minReplicaCount"] >= 1, "a pair needs one of each"
        role = name.removeprefix("pdserve-")
        for trigger in spec["triggers"]:
            assert f'engine_type="{role}"' in trigger["metadata"]["query"]
            assert 'namespace="pdserve"' in trigger["metadata"]["query"]


@pytest.mark.parametrize("overlay", ALL)
def test_what_must_be_alike_on_both_sides_is(overlay: str) -> None:
    servers = [server_of(pod, overlay) for pod in pods(rendered(overlay)) if pod.is_server]
    alike = {(s.model, s.memory.page_size, s.disagg.disaggregation_transfer_backend) for s in servers}
    assert len(alike) == 1


@pytest.mark.parametrize("overlay", ALL)
async def test_probes_ask_paths_that_exist_at_ports_that_are_open(overlay: str) -> None:
    for pod in pods(rendered(overlay)):
        if pod.index:
            assert not set(PROBES) & set(pod.container), f"{pod.name} has no HTTP server"
            continue
        if pod.is_server:
            server = server_of(pod, overlay)
            port, paths = server.serving.port, server_paths(server)
        else:
            router = router_of(overlay)
            port, paths = router.port, await router_paths(router)
        assert {"name": "http", "containerPort": port} in pod.container["ports"]
        for name in PROBES:
            probe = pod.container[name]
            assert probe["httpGet"]["port"] == "http"
            assert probe["httpGet"]["path"] in paths, f"{pod.name}: {name}"


@pytest.mark.parametrize("overlay", ALL)
def test_nothing_is_killed_for_being_busy_or_alone(overlay: str) -> None:
    for pod in (pod for pod in pods(rendered(overlay)) if not pod.index):
        live, started, ready = (pod.container[f"{name}Probe"] for name in ("liveness", "startup", "readiness"))
        assert live["httpGet"]["path"] == ("/health" if pod.is_server else "/liveness")
        assert ready["httpGet"]["path"] == ("/ready" if pod.is_server else "/readiness")
        if pod.is_server:
            assert ready["timeoutSeconds"] > health.STATE_TIMEOUT_S + health.SECOND_LOOK_S
            assert started["httpGet"]["path"] == "/health_generate"
            assert started["timeoutSeconds"] > health.PROBE_TIMEOUT_S


@pytest.mark.parametrize("overlay", ALL)
def test_the_grace_period_is_longer_than_a_drain(overlay: str) -> None:
    for pod in pods(rendered(overlay)):
        if pod.is_server:
            most_s = drain_s(server_of(pod, overlay))
        else:
            before = pod.container["lifecycle"]["preStop"]["exec"]["command"]
            most_s = float(before[1]) + router_of(overlay).shutdown_timeout_s
        assert pod.spec["terminationGracePeriodSeconds"] > most_s + 10, pod.name


@pytest.mark.parametrize("overlay", ALL)
def test_servers_have_the_token_and_routers_the_key_for_their_proofs_from_secrets(overlay: str) -> None:
    assert of_kind(rendered(overlay), "Secret") == [], "make the secrets by hand; docs/deploying.md says how"
    secrets = {CONTROL_TOKEN: "pdserve-control-token", WORKER_PROOF_KEY: "pdserve-worker-proof-key"}
    for pod in pods(rendered(overlay)):
        name = CONTROL_TOKEN if pod.is_server else WORKER_PROOF_KEY
        found = {entry["name"]: entry["valueFrom"] for entry in pod.container["env"] if entry["name"] in secrets}
        assert found == {name: {"secretKeyRef": {"name": secrets[name], "key": name}}}, pod.name


@pytest.mark.parametrize("overlay", ALL)
def test_api_keys_are_everywhere_or_nowhere(overlay: str) -> None:
    """From one secret, which need not be there: a router without the key of its servers would be refused by them."""
    for pod in pods(rendered(overlay)):
        found = {entry["name"]: entry["valueFrom"] for entry in pod.container["env"] if entry["name"] in API_KEYS}
        assert found == {
            name: {"secretKeyRef": {"name": "pdserve-api-keys", "key": name, "optional": True}} for name in API_KEYS
        }, pod.name


@pytest.mark.parametrize("overlay", ALL)
def test_containers_are_closed(overlay: str) -> None:
    for pod in pods(rendered(overlay)):
        security = pod.container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        pinned = overlay in ON_RDMA and pod.is_server
        assert security["capabilities"].get("add", []) == (["IPC_LOCK"] if pinned else [])
        assert pinned or pod.spec["securityContext"]["runAsNonRoot"] is True
        watches = overlay in DISCOVERING and not pod.is_server
        assert pod.spec["automountServiceAccountToken"] is watches
        assert not pod.spec.get("hostNetwork", False), "network policies do not reach the host's network"


@pytest.mark.parametrize("overlay", ALL)
def test_volumes_are_mounted_and_the_cache_is_writable(overlay: str) -> None:
    for pod in pods(rendered(overlay)):
        mounts = {mount["name"]: mount for mount in pod.container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        assert mounts.keys() == volumes.keys(), pod.name
        assert {mount["mountPath"] for mount in mounts.values()} >= {"/tmp"}
        if pod.is_server:
            cache = environment(pod, rendered(overlay))["PDSERVE_CACHE"]
            writable = {mounts[name]["mountPath"] for name, volume in volumes.items() if "emptyDir" in volume}
            assert {cache, "/tmp", "/dev/shm"} <= writable


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_resources_are_what_the_flags_use(overlay: str) -> None:
    for pod in pods(rendered(overlay)):
        requests, limits = (pod.container["resources"][key] for key in ("requests", "limits"))
        assert "cpu" in requests and "memory" in requests and "memory" in limits
        if not pod.is_server:
            continue
        config = server_of(pod, overlay)
        num_ranks = config.parallel.tp_size * config.parallel.pp_size
        if config.kernels.device == "cuda":
            assert int(limits["nvidia.com/gpu"]) * pod.size == num_ranks * config.parallel.dp_size, pod.name
            assert ("rdma/hca" in limits) == (config.disagg.disaggregation_ib_device is not None)
        else:
            assert config.memory.max_total_tokens is not None, "on CPU a server sees the host's memory, not the limit"
            assert config.kernels.cpu_threads == int(requests["cpu"]), "nor does it see its share of the cores"
