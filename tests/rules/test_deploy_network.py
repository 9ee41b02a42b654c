"""What the network policies let through, judged by a small model of their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.rules.deploy_kit import DISCOVERING, OVERLAYS, of_kind, pods, rendered

Labels = Mapping[str, str]
APP, PART = "app.kubernetes.io/name", "app.kubernetes.io/component"
HERE = {"kubernetes.io/metadata.name": "pdserve"}
STRANGER = {APP: "somebody", PART: "prefill"}
NAMED = {"http": {"prefill": 30000, "decode": 30000, "router": 8000}}


def selects(selector: Mapping[str, Any], labels: Labels) -> bool:
    """A label selector with matchLabels and In expressions; an empty one selects all."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", "this model knows no other operator"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def admits(rule: Mapping[str, Any], side: str, labels: Labels, namespace: Labels, target: Labels, port: int) -> bool:
    """One rule; `side` is its key for peers. A named port means that of `target`."""
    numbers = {NAMED.get(entry["port"], {}).get(target.get(PART, ""), entry["port"]) for entry in rule.get("ports", ())}
    if numbers and port not in numbers:
        return False
    for peer in rule.get(side, ({"podSelector": {}, "namespaceSelector": {}},)):
        in_namespace = (
            selects(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else namespace == HERE
        )
        if in_namespace and selects(peer.get("podSelector", {}), labels):
            return True
    return False


def passes(
    overlay: str, source: Labels, target: Labels, port: int, *, origin: Labels = HERE, to: Labels = HERE
) -> bool:
    """Whether a TCP connection is let out at its source and in at its target. Pods without a policy are open."""
    policies = of_kind(rendered(overlay), "NetworkPolicy")
    out = [p["spec"] for p in policies if origin == HERE and selects(p["spec"]["podSelector"], source)]
    into = [p["spec"] for p in policies if to == HERE and selects(p["spec"]["podSelector"], target)]
    leaves = not out or any(admits(r, "to", target, to, target, port) for p in out for r in p.get("egress", ()))
    enters = not into or any(
        admits(r, "from", source, origin, target, port) for p in into for r in p.get("ingress", ())
    )
    return leaves and enters


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_strangers_reach_the_router_and_no_server(overlay: str) -> None:
    outside = {"kubernetes.io/metadata.name": "default"}
    parts = {pod.labels[PART]: pod.labels for pod in pods(rendered(overlay))}
    for source, origin in ((STRANGER, HERE), (STRANGER, outside), (parts["decode"], outside)):
        assert passes(overlay, source, parts["router"], 8000, origin=origin)
        for port in (30000, 8998, 20000, 12345):
            assert not passes(overlay, source, parts["prefill"], port, origin=origin)
            assert not passes(overlay, source, parts["decode"], port, origin=origin)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_servers_reach_each_other_at_every_port(overlay: str) -> None:
    parts = {pod.labels[PART]: pod.labels for pod in pods(rendered(overlay))}
    for source in ("prefill", "decode"):
        for target in ("prefill", "decode"):
            for port in (8998, 20000, 12345, 65535):
                assert passes(overlay, parts[source], parts[target], port)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_router_reaches_the_http_port_of_servers_and_nothing_else(overlay: str) -> None:
    parts = {pod.labels[PART]: pod.labels for pod in pods(rendered(overlay))}
    for target in ("prefill", "decode"):
        assert passes(overlay, parts["router"], parts[target], 30000)
        assert not passes(overlay, parts["router"], parts[target], 8998)
        assert not passes(overlay, parts["router"], parts[target], 12345)
    for port in (443, 6443):  # the API server, whose address is not known here
        assert passes(overlay, parts["router"], STRANGER, port) == (overlay in DISCOVERING)
    assert not passes(overlay, parts["router"], STRANGER, 80)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_prometheus_reaches_metrics_and_all_reach_names(overlay: str) -> None:
    parts = {pod.labels[PART]: pod.labels for pod in pods(rendered(overlay))}
    monitoring = {"kubernetes.io/metadata.name": "monitoring"}
    system = {"kubernetes.io/metadata.name": "kube-system"}
    for labels in parts.values():
        port = NAMED["http"][labels[PART]]
        assert passes(overlay, {"app": "prometheus"}, labels, port, origin=monitoring)
        assert passes(overlay, labels, {"k8s-app": "kube-dns"}, 53, to=system)
    assert not passes(overlay, {"app": "prometheus"}, parts["prefill"], 8998, origin=monitoring)
