"""The Helm chart: what Helm's own library says of it, its schema, and the cases that the other deployments lack.

The tests of `test_deploy_k8s` and `test_deploy_network` check the rendered chart as they check the overlays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
import yaml

import pdserve
from pdserve.config.groups import ServerConfig
from pdserve.router.config.config import RouterConfig, WorkerRole
from tests.rules.deploy_kit import (
    CHART,
    EXAMPLES,
    K8S,
    Document,
    ask_helm,
    example,
    of_kind,
    parse_command,
    pod_command,
    pods,
    rendered,
    rendered_chart,
)
from tests.rules.test_deploy_k8s import check_schema

ALL = ("", *sorted(path.stem for path in EXAMPLES.glob("*.yaml")))


def test_helm_finds_nothing_in_the_chart_with_any_example() -> None:
    for report in ask_helm([], [example(name) for name in ALL])["lint"]:
        worth = [one for one in report["messages"] if "icon is recommended" not in one["error"]]
        assert (worth, report["errors"]) == ([], [])


def test_the_charts_version_is_that_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == pdserve.__version__


def test_every_value_is_in_the_schema_and_every_name_in_the_schema_is_a_value() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft7Validator(schema).validate(values)

    def compare(part: Document, given: Any, where: str) -> None:
        if "$ref" in part:
            part = schema["definitions"][part["$ref"].rpartition("/")[2]]
        named = part.get("properties")
        if named is not None:
            assert set(named) - {"global"} == set(given), where
            for name, inner in named.items():
                if name in given:
                    compare(inner, given[name], f"{where}.{name}")

    compare(schema, values, "values")


def test_servers_that_run_both_roles_stand_behind_a_router_with_a_fixed_list() -> None:
    documents = rendered_chart(example("monolith"))
    for document in documents:
        check_schema(document)
    router, server = (parse_command(pod_command(pod, documents)) for pod in pods(documents))
    assert isinstance(router, RouterConfig) and isinstance(server, ServerConfig)
    assert server.disagg.disaggregation_mode == "null"
    assert [spec.url for spec in router.workers] == [
        f"http://pdserve-monolith-{index}.pdserve-monolith:{server.serving.port}" for index in (0, 1)
    ]
    assert of_kind(documents, "Role") == [] and router.discovery is None


def test_without_discovery_the_router_knows_the_pods_of_stateful_sets_and_groups() -> None:
    values = {"router": {"discovery": False}, "prefill": {"replicas": 2, "groupSize": 2, "tpSize": 2}}
    documents = rendered_chart(values)
    (router,) = (parse_command(pod_command(pod, documents)) for pod in pods(documents) if not pod.is_server)
    assert isinstance(router, RouterConfig)
    assert {(spec.role, spec.url) for spec in router.workers} == {
        (WorkerRole.PREFILL, "http://pdserve-prefill-0.pdserve-prefill:30000"),
        (WorkerRole.PREFILL, "http://pdserve-prefill-1.pdserve-prefill:30000"),
        (WorkerRole.DECODE, "http://pdserve-decode-0.pdserve-decode:30000"),
    }
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(documents, "Service")}
    assert services["pdserve-decode"]["clusterIP"] == "None"
    assert "pdserve-prefill" not in services, "the controller of LeaderWorkerSets makes it"


def test_options_take_effect() -> None:
    values: Document = {
        "image": {"repository": "registry/pdserve", "tag": "9", "pullSecrets": [{"name": "pull"}]},
        "secrets": {"create": True, "values": {"controlToken": "t" * 20, "workerProofKey": "k" * 64, "apiKey": "a"}},
        "networkPolicy": {"apiServer": {"cidr": "10.0.0.1/32", "ports": [6443]}},
        "decode": {"maxUnavailable": None, "podLabels": {"team": "x"}, "args": ["--max-total-tokens=9"]},
        "router": {"service": {"type": "LoadBalancer", "port": 80}, "args": ["--queue-size=9"]},
        "model": {"hubOffline": False},
        "keda": {"enabled": True, "decode": {"tokenUsage": None}},
    }
    documents = rendered_chart(values)
    for document in documents:
        check_schema(document)
    for pod in pods(documents):
        assert pod.container["image"] == "registry/pdserve:9"
        assert pod.spec["imagePullSecrets"] == [{"name": "pull"}]
    secrets = {one["metadata"]["name"]: one["stringData"] for one in of_kind(documents, "Secret")}
    assert secrets["pdserve-api-keys"] == {"PDSERVE_API_KEY": "a"} and len(secrets) == 3
    assert "pdserve-decode" not in {one["metadata"]["name"] for one in of_kind(documents, "PodDisruptionBudget")}
    (router,) = (one for one in of_kind(documents, "NetworkPolicy") if one["metadata"]["name"] == "pdserve-router")
    assert {"ports": [{"protocol": "TCP", "port": 6443}], "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]} in router[
        "spec"
    ]["egress"]
    scaled = {one["metadata"]["name"]: one["spec"] for one in of_kind(documents, "ScaledObject")}
    assert len(scaled["pdserve-decode"]["triggers"]) == 2
    assert scaled["pdserve-decode"]["scaleTargetRef"]["kind"] == "StatefulSet"
    assert all("replicas" not in one["spec"] for one in of_kind(documents, "StatefulSet"))


WRONG: list[tuple[Document, str]] = [
    ({"mode": "both"}, "mode"),
    ({"prefil": {}}, "prefil"),
    ({"prefill": {"replicas": 0}}, "replicas"),
    ({"decode": {"args": "--page-size=64"}}, "args"),
    ({"router": {"policy": "fastest"}}, "policy"),
    ({"keda": {"enabled": True}, "router": {"discovery": False}}, "discovery"),
    ({"rdma": {"enabled": True}}, "device"),
    ({"prefill": {"groupSize": 2}}, "prefill: tpSize * ppSize = 1 is not divisible by groupSize = 2"),
    ({"secrets": {"create": True}}, "secrets.values.controlToken is needed"),
]


def test_wrong_values_are_refused_by_name() -> None:
    answers = ask_helm([values for values, _ in WRONG])["answers"]
    for (_, message), answer in zip(WRONG, answers, strict=True):
        assert message in answer.get("error", ""), answer


def test_keda_reads_the_same_signals_in_the_chart_as_in_the_component() -> None:
    """`test_dashboards` compares those of the component with what servers export."""

    def signals(documents: Iterable[Document]) -> set[tuple[str, str, str]]:
        """(role, metric and labels without their values, the rest of the query)."""
        found = set()
        for document in of_kind(list(documents), "ScaledObject"):
            role = document["metadata"]["name"].removeprefix("pdserve-")
            for trigger in document["spec"]["triggers"]:
                query = re.sub(r',pod=~"[^"]*"', "", trigger["metadata"]["query"])
                found.add((role, trigger["metricType"] + trigger["metadata"]["threshold"], query))
        return found

    expected = signals(yaml.safe_load_all((K8S / "components" / "keda" / "scaled-objects.yaml").read_text()))
    assert signals(rendered("helm-rdma")) == expected
    (monolith,) = of_kind(rendered_chart({"mode": "monolith", "keda": {"enabled": True}}), "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in monolith["spec"]["triggers"]]
    known = {name for _, _, query in expected for name in re.findall(r"sglang:\w+", query)}
    assert {name for query in queries for name in re.findall(r"sglang:\w+", query)} <= known
    assert all('engine_type="unified"' in query for query in queries)


def test_two_releases_in_a_namespace_do_not_meet() -> None:
    """Every selector names the release."""
    for document in rendered("helm-rdma"):
        if document["kind"] in ("StatefulSet", "Deployment", "PodDisruptionBudget", "PodMonitor"):
            assert document["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == "pdserve"
        if document["kind"] == "NetworkPolicy":
            assert "app.kubernetes.io/instance" in json.dumps(document["spec"]["podSelector"])
