"""What the tests of `configs/` share: rendered Kubernetes documents, command lines, and the real parsers.

A command line is the list of words after the interpreter: `-m pdserve.launch_server --port=30000 ...`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.routing import APIRoute

from pdserve import launch_engine
from pdserve.config.cli import parse_server_args
from pdserve.config.groups import ServerConfig
from pdserve.config.resolve import Machine, fill_in
from pdserve.errors import ConfigError
from pdserve.launch_local import LocalConfig
from pdserve.launch_local import config_from as local_config_from
from pdserve.launch_router import config_from as router_config_from
from pdserve.launch_router import make_parser as make_router_parser
from pdserve.protocol.channel import memory_channel_pair
from pdserve.router.app import make_app
from pdserve.router.config.config import RouterConfig
from pdserve.server.app import create_app, make_metrics
from pdserve.server.engine_client.client import EngineClient
from pdserve.server.lifecycle import instance, run

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
K8S = CONFIGS / "k8s"
CHART = CONFIGS / "helm" / "pdserve"
EXAMPLES = CONFIGS / "helm" / "examples"
HELM = ("helm", "helm-gpu", "helm-rdma")
"""The chart with its defaults, and with the values of `configs/helm/examples`."""
OVERLAYS = ("laptop", "gpu", "rdma", "autoscaled", *HELM)
"""All deployments of prefill and decode servers on Kubernetes that can be applied."""
DISCOVERING = ("autoscaled", *HELM)
"""Those whose routers find servers by their labels."""
ON_RDMA = ("rdma", "helm-rdma")
RENDER = """
import json, sys
import helm_python
asked = json.load(sys.stdin)
chart = helm_python.Chart.load(asked["chart"])
answers = []
for values in asked["values"]:
    try:
        answers.append({"files": chart.render(values, name="pdserve", namespace="pdserve")})
    except helm_python.HelmError as error:
        answers.append({"error": str(error)})
print(json.dumps({"answers": answers, "lint": [helm_python.lint(asked["chart"], v) for v in asked["lint"]]}))
"""
"""Helm's own library renders in a process of its own: it is written in Go."""
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
"""Label of a pod's place in its group; the controller of LeaderWorkerSets sets it."""
BIG_MACHINE = Machine(has_cuda=True, num_cores=256)
POD_IP = "10.1.2.3"
Document = dict[str, Any]
Config = ServerConfig | RouterConfig | LocalConfig


def parse_command(words: Sequence[str]) -> Config:
    """What the program behind a command line makes of it. ConfigError or an assertion when it would refuse it."""
    assert words[0] == "-m", f"expected -m MODULE, got {list(words)}"
    module, argv = words[1], list(words[2:])
    match module:
        case "pdserve.launch_server":
            config, _ = fill_in(parse_server_args(argv), BIG_MACHINE)
            return config
        case "pdserve.launch_router":
            try:
                return router_config_from(make_router_parser().parse_args(argv))
            except SystemExit as error:
                raise ConfigError(f"launch_router refuses {argv}") from error
        case "pdserve.launch_local":
            local = local_config_from(argv)
            parse_server_args(["--model-path", local.model_path, *local.server_flags])
            return local
    raise AssertionError(f"there is no program {module}")


@functools.cache
def _kustomize_command() -> tuple[str, ...]:
    if shutil.which("kustomize"):
        return ("kustomize", "build")
    if shutil.which("kubectl"):
        return ("kubectl", "kustomize")
    return ()


@functools.cache
def rendered(name: str) -> tuple[Document, ...]:
    """The documents of an overlay, of `base`, or of the chart (`helm`, `helm-EXAMPLE`); do not change them.

    Skips the test where kustomize or Helm is missing.
    """
    if name.startswith("helm"):
        return rendered_chart(example(name.removeprefix("helm").removeprefix("-")))
    command = _kustomize_command()
    if not command:
        pytest.skip("neither kustomize nor kubectl is installed, so overlays cannot be rendered")
    folder = K8S / name if name == "base" else K8S / "overlays" / name
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def example(name: str) -> Document:
    """The values of an example of the chart; "": none, for its defaults."""
    return {} if not name else dict(yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()))


def ask_helm(values: Sequence[Document], lint: Sequence[Document] = ()) -> Document:
    """`answers`: the files of the chart, or an `error`, for each of `values`; `lint`: Helm's report for each."""
    pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    asked = {"chart": str(CHART), "values": list(values), "lint": list(lint)}
    command = [sys.executable, "-c", RENDER]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def rendered_chart(values: Document) -> tuple[Document, ...]:
    """The documents of the chart with these values."""
    (answer,) = ask_helm([values])["answers"]
    assert "error" not in answer, answer
    texts = [text for name, text in answer["files"].items() if name.endswith(".yaml")]
    return tuple(document for text in texts for document in yaml.safe_load_all(text) if document)


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    """The documents of one kind."""
    return [document for document in documents if document["kind"] == kind]


@dataclasses.dataclass(frozen=True)
class Pod:
    """One pod that the documents would make. `index` is its place in its group, `size` the group's."""

    owner: Document
    template: Document
    index: int = 0
    size: int = 1

    @property
    def name(self) -> str:
        return f"{self.owner['metadata']['name']}[{self.index}]"

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def spec(self) -> Document:
        return dict(self.template["spec"])

    @property
    def container(self) -> Document:
        (only,) = self.template["spec"]["containers"]
        assert isinstance(only, dict)
        return only

    @property
    def is_server(self) -> bool:
        return self.labels["app.kubernetes.io/component"] in ("prefill", "decode", "monolith")


def pods(documents: Sequence[Document]) -> list[Pod]:
    """One pod per template; of a group its first pod, and its last one from the template of the others."""
    plain = [*of_kind(documents, "Deployment"), *of_kind(documents, "StatefulSet")]
    found = [Pod(owner, owner["spec"]["template"]) for owner in plain]
    for owner in of_kind(documents, "LeaderWorkerSet"):
        group = owner["spec"]["leaderWorkerTemplate"]
        found.append(Pod(owner, group["leaderTemplate"], 0, group["size"]))
        if group["size"] > 1:
            found.append(Pod(owner, group["workerTemplate"], group["size"] - 1, group["size"]))
    return found


def environment(pod: Pod, documents: Sequence[Document]) -> dict[str, str]:
    """The container's environment, as kubelet and the LeaderWorkerSet controller make it; secrets read `secret`."""
    maps = {document["metadata"]["name"]: document["data"] for document in of_kind(documents, "ConfigMap")}
    values: dict[str, str] = {}
    for source in pod.container.get("envFrom", ()):
        values |= maps[source["configMapRef"]["name"]]
    for entry in pod.container.get("env", ()):
        source = entry.get("valueFrom", {})
        fields = {"status.podIP": POD_IP, "metadata.namespace": pod.owner["metadata"].get("namespace", "default")}
        known = fields[source["fieldRef"]["fieldPath"]] if "fieldRef" in source else "secret"
        values[entry["name"]] = known if source else entry["value"]
    if pod.owner["kind"] == "LeaderWorkerSet":
        name, namespace = (pod.owner["metadata"][key] for key in ("name", "namespace"))
        values |= {
            "LWS_LEADER_ADDRESS": f"{name}-0.{name}.{namespace}",
            "LWS_GROUP_SIZE": str(pod.size),
            "LWS_WORKER_INDEX": str(pod.index),
        }
    return values


def expanded(word: str, values: Mapping[str, str]) -> str:
    """`word` with each `$(NAME)` replaced; a name that is nowhere is an error here, Kubernetes would leave it."""
    return re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word)


def pod_command(pod: Pod, documents: Sequence[Document]) -> list[str]:
    """The command line of a pod."""
    values = environment(pod, documents)
    words = [*pod.container["command"], *pod.container["args"]]
    assert words[0] == "python"
    return [expanded(word, values) for word in words[1:]]


def documented_commands(text: str) -> Iterator[list[str]]:
    """Command lines in a page's code blocks, or in a file's comments; `$PREFILL_HOST` reads as prefill-host."""
    plain = re.sub(r"^#+ ?", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    for line in plain.splitlines():
        found = re.match(r"\s*\S*python (-m pdserve\.launch_\w+ .*)", line)
        if found:
            words = shlex.split(found[1], comments=True)
            yield [re.sub(r"\$(\w+)", _spoken, word) for word in words if word != "&"]


def _spoken(variable: re.Match[str]) -> str:
    return variable[1].lower().replace("_", "-")


def server_paths(config: ServerConfig) -> set[str]:
    """The paths that a server answers."""
    api, _ = memory_channel_pair()
    metrics = make_metrics(config)
    app = create_app(config, EngineClient(api, None, metrics), None, metrics)
    return {route.path for route in app.routes if isinstance(route, APIRoute)}


async def router_paths(config: RouterConfig) -> set[str]:
    """The paths that a router answers."""
    app = make_app(dataclasses.replace(config, discovery=None))  # there is no API server here
    paths = {resource.canonical for resource in app.router.resources()}
    await app.cleanup()
    return paths


def drain_s(config: ServerConfig) -> float:
    """How long a server may take to end: requests in flight, then its engine, told, asked and killed."""
    ends = config.serving.timeout_graceful_shutdown + instance.ABORT_S + instance.QUIET_S + run.OTHERS_S
    return ends + 3 * launch_engine.STOP_S
