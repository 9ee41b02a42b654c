"""The compose file's own command lines as processes on loopback: they work together, and the probes find them well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
import yaml

from pdserve.base.env import CONTROL_TOKEN, WORKER_PROOF_KEY
from pdserve.http.session_proof import worker_secret
from tests.e2e.harness import GRACE_S, Server
from tests.rules.deploy_kit import CONFIGS, pods, rendered

PARTS = ("prefill", "decode", "router")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
TOKEN = "of-this-deployment-0123456789"
SECRETS = {CONTROL_TOKEN: TOKEN, WORKER_PROOF_KEY: worker_secret(TOKEN).hex()}


def start(part: str, **changes: str) -> Server:
    """The process of a service, with other values for some flags (underscores for dashes); not waited for."""
    services = yaml.safe_load((CONFIGS / "docker" / "compose.yaml").read_text())["services"]
    _, _, module, *flags = services[part]["command"]
    flags = [word for word in flags if word != "8998"]  # the router asks the prefill server for it
    left = {name.replace("_", "-"): value for name, value in changes.items()}
    for index, word in enumerate(flags):
        name, equals, _ = word.removeprefix("--").partition("=")
        if name in left:
            flags[index if equals else index + 1] = f"--{name}={left.pop(name)}" if equals else left.pop(name)
    assert left == {}, "the compose file no longer has these flags"
    secrets = {name: SECRETS[name] for name in services[part]["environment"] if name in SECRETS}
    return Server(part, module, flags, variables=secrets)


@pytest.fixture(scope="module")
def deployment() -> Iterator[dict[str, Server]]:
    """All services, with loopback for their networks and free ports."""
    here = {"host": "127.0.0.1", "port": "0"}
    peers = here | {"disaggregation_host": "127.0.0.1"}
    parts: dict[str, Server] = {}
    try:
        parts["prefill"] = start("prefill", disaggregation_bootstrap_port="0", **peers)
        parts["decode"] = start("decode", **peers)
        prefill, decode = parts["prefill"].wait(), parts["decode"].wait()
        parts["router"] = start("router", prefill=prefill.url, decode=decode.url, **here)
        parts["router"].wait()
        yield parts
    finally:
        for part in reversed(PARTS):
            if part in parts:
                parts[part].child.end(GRACE_S)


@pytest.mark.slow
def test_a_question_is_answered(deployment: dict[str, Server]) -> None:
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = requests.post(f"{deployment['router'].url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["text"]
    for part in ("prefill", "decode"):
        refused = requests.post(f"{deployment[part].url}/v1/completions", json=body, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "control_proof_required")


@pytest.mark.slow
def test_every_probe_of_kubernetes_is_content(deployment: dict[str, Server]) -> None:
    for pod in pods(rendered("laptop")):
        server = deployment[pod.labels["app.kubernetes.io/component"]]
        for path in (pod.container[name]["httpGet"]["path"] for name in PROBES):
            assert requests.get(server.url + path, timeout=30).status_code == 200, (pod.name, path)


@pytest.mark.slow
def test_a_router_without_servers_is_alive_and_not_ready(deployment: dict[str, Server]) -> None:
    gone = "http://127.0.0.1:1"
    router = start("router", host="127.0.0.1", port="0", prefill=deployment["prefill"].url, decode=gone)
    try:
        router.wait()
        assert requests.get(f"{router.url}/liveness", timeout=30).status_code == 200
        assert requests.get(f"{router.url}/readiness", timeout=30).status_code == 503
    finally:
        router.child.end(GRACE_S)
