"""What is not Kubernetes in `configs/`: image, compose file, units, scripts; and the commands in the pages."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.base.env import CONTROL_TOKEN, WORKER_PROOF_KEY
from pdserve.config.groups import ServerConfig
from pdserve.http.credentials import ADMIN_API_KEY, API_KEY
from pdserve.launch_engine import REFUSED
from pdserve.launch_local import LocalConfig
from pdserve.router.config.config import RouterConfig, WorkerRole
from tests.rules.deploy_kit import (
    CONFIGS,
    ROOT,
    Config,
    documented_commands,
    drain_s,
    parse_command,
    router_paths,
    server_paths,
)

API_KEYS = (API_KEY, ADMIN_API_KEY)

DOCKERFILE = CONFIGS / "docker" / "Dockerfile"
FOR_CUDA = CONFIGS / "docker" / "Dockerfile.cuda"
DOCKERFILES = (DOCKERFILE, FOR_CUDA)
COMPOSE = CONFIGS / "docker" / "compose.yaml"
SYSTEMD = CONFIGS / "systemd"
UNITS = ("prefill", "decode", "router")
STUB = """#!/bin/sh
printf '%s\\n' "$@" > "$STUB_LOG.$$" && mv "$STUB_LOG.$$" "$STUB_LOG/$$"
while [ "$(ls "$STUB_LOG" | wc -l)" -lt 3 ]; do sleep 0.05; done
"""
"""Stands for the interpreter: writes down its arguments, and ends when three have done so."""
WORST_EXPOSURE = 30
"""Tenths of systemd's score for how open a unit is: 0 is closed, 100 is open."""


def services() -> dict[str, dict[str, Any]]:
    found = yaml.safe_load(COMPOSE.read_text())["services"]
    assert isinstance(found, dict)
    return found


def service_config(name: str) -> Config:
    words = services()[name]["command"]
    assert words[0] == "python"
    return parse_command(words[1:])


def unit_lines(role: str) -> list[tuple[str, str]]:
    """(key, value) of a unit, continuation lines joined."""
    text = (SYSTEMD / f"pdserve-{role}.service").read_text().replace("\\\n", " ")
    lines = [line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return [(key, value) for key, _, value in lines]


def unit_value(role: str, key: str) -> str:
    (value,) = [value for name, value in unit_lines(role) if name == key]
    return value


def unit_config(role: str) -> Config:
    """What the program of a unit makes of its command line; `$NAME` is split into words, `${NAME}` is not."""
    lines = [line for line in (SYSTEMD / "pdserve.env").read_text().splitlines() if not line.startswith("#")]
    values = {
        name: "".join(shlex.split(value)) if value else "" for name, _, value in (x.partition("=") for x in lines)
    }
    words: list[str] = []
    for word in unit_value(role, "ExecStart").split():
        if re.fullmatch(r"\$\w+", word):
            words += values[word[1:]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], word))
    assert words[0].endswith("/.venv/bin/python")
    return parse_command(words[1:])


def test_the_compose_file_is_valid_by_its_schema() -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_starts_a_pair_and_a_router_that_knows_it() -> None:
    expected = set()
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
        config = service_config(role)
        assert isinstance(config, ServerConfig)
        disagg = config.disagg
        assert disagg.disaggregation_mode == role
        assert disagg.disaggregation_host == role, "peers reach a service by its name"
        port = disagg.disaggregation_bootstrap_port if role is WorkerRole.PREFILL else None
        expected.add((role, f"http://{role}:{config.serving.port}", port))
    router = service_config("router")
    assert isinstance(router, RouterConfig)
    assert {(spec.role, spec.url, spec.bootstrap_port) for spec in router.workers} == expected


def test_compose_keeps_servers_on_a_network_without_a_way_out() -> None:
    document = yaml.safe_load(COMPOSE.read_text())
    assert document["networks"]["servers"] == {"internal": True}
    for name in ("prefill", "decode"):
        assert services()[name]["networks"] == ["servers"]
        assert "ports" not in services()[name]
    assert all(published.startswith("127.0.0.1:") for published in services()["router"]["ports"])
    environment = services()["router"]["environment"]
    assert CONTROL_TOKEN not in environment and environment[WORKER_PROOF_KEY].startswith("${PDSERVE_WORKER_PROOF_KEY:?")
    for service in services().values():
        assert {name: service["environment"][name] for name in API_KEYS} == {
            name: f"${{{name}:-}}" for name in API_KEYS
        }


def test_compose_says_what_a_container_may_use_and_gives_it_time_to_end() -> None:
    for name, service in services().items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and "mem_limit" in service
        config, grace_s = service_config(name), float(service["stop_grace_period"].removesuffix("s"))
        if isinstance(config, ServerConfig):
            assert service["environment"][CONTROL_TOKEN].startswith("${PDSERVE_CONTROL_TOKEN:?")
            assert config.memory.max_total_tokens is not None, "a server sees the machine's memory, not its own limit"
            assert config.kernels.cpu_threads == service["cpus"] == int(service["environment"]["OMP_NUM_THREADS"])
            assert grace_s > drain_s(config) + 10
        else:
            assert isinstance(config, RouterConfig)
            assert grace_s > config.shutdown_timeout_s


async def test_compose_health_checks_ask_paths_that_exist() -> None:
    for name, service in services().items():
        kind, python, flag, code = service["healthcheck"]["test"]
        assert (kind, python, flag) == ("CMD", "python", "-c")
        compile(code, name, "exec")
        (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", code)
        config = service_config(name)
        if isinstance(config, ServerConfig):
            assert int(url[0]) == config.serving.port and url[1] in server_paths(config)
        else:
            assert isinstance(config, RouterConfig)
            assert int(url[0]) == config.port and url[1] in await router_paths(config)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=str)
def test_the_image_is_built_of_files_that_exist_and_are_let_in(dockerfile: Path) -> None:
    ignored = dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text()
    let_in = {line[1:] for line in ignored.split() if line[0] == "!"}
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.*)", dockerfile.read_text(), flags=re.MULTILINE)
        for name in line.split()[:-1]
    }
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)


def test_compose_builds_the_image_without_a_gpu() -> None:
    for name in services():
        build = services()[name].get("build", {"context": "../..", "dockerfile": "configs/docker/Dockerfile"})
        assert ((COMPOSE.parent / build["context"]).resolve() / build["dockerfile"]) == DOCKERFILE


def test_the_image_starts_a_service_by_itself() -> None:
    (command,) = re.findall(r"^CMD (.*)", DOCKERFILE.read_text(), flags=re.MULTILINE)
    config = parse_command(json.loads(command)[1:])
    assert isinstance(config, LocalConfig)
    assert config.router_host == "0.0.0.0"


def test_the_image_for_gpus_starts_a_server_and_has_what_kernels_and_engines_need() -> None:
    text = FOR_CUDA.read_text()
    (command,) = re.findall(r"^CMD (.*)", text, flags=re.MULTILINE)
    config = parse_command(json.loads(command)[1:])
    assert isinstance(config, ServerConfig)
    assert (config.serving.host, config.disagg.disaggregation_mode) == ("0.0.0.0", "null")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (given,) = re.findall(r"^ARG EXTRA=(.*)", text, flags=re.MULTILINE)
    assert set(given.split(",")) <= set(extras)
    (installed,) = re.findall(r"--no-install-recommends \\\n(.*)\\", text)
    assert {"gcc", "python3-dev", "ibverbs-providers", "libibverbs1", "libnuma1"} <= set(installed.split())


def test_images_are_those_that_the_manifests_name() -> None:
    named = {DOCKERFILE: "0.1.0", FOR_CUDA: "0.1.0-cuda"}
    for dockerfile, tag in named.items():
        assert f"-t pdserve:{tag} ." in dockerfile.read_text()
    gpu = yaml.safe_load((CONFIGS / "k8s" / "overlays" / "gpu" / "kustomization.yaml").read_text())
    chart = yaml.safe_load((CONFIGS / "helm" / "examples" / "gpu.yaml").read_text())
    assert gpu["images"][0]["newTag"] == chart["image"]["tag"] == named[FOR_CUDA]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=str)
def test_hadolint_finds_nothing_in_the_dockerfiles(dockerfile: Path) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run(["hadolint", str(dockerfile)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_units_start_a_pair_and_a_router_that_knows_it() -> None:
    expected = set()
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
        config = unit_config(role)
        assert isinstance(config, ServerConfig)
        assert config.disagg.disaggregation_mode == role
        port = config.disagg.disaggregation_bootstrap_port if role is WorkerRole.PREFILL else None
        expected.add((role, f"http://{config.serving.host}:{config.serving.port}", port))
    router = unit_config("router")
    assert isinstance(router, RouterConfig)
    assert {(spec.role, spec.url, spec.bootstrap_port) for spec in router.workers} == expected


@pytest.mark.parametrize("role", UNITS)
def test_units_start_again_after_a_crash_and_never_after_wrong_flags(role: str) -> None:
    assert unit_value(role, "Restart") == "on-failure"
    assert unit_value(role, "RestartPreventExitStatus") == str(REFUSED)
    assert unit_value(role, "KillMode") == "mixed"
    config, stop_s = unit_config(role), float(unit_value(role, "TimeoutStopSec"))
    assert stop_s > 10 + (config.shutdown_timeout_s if isinstance(config, RouterConfig) else drain_s(config))


def test_the_routers_unit_has_the_key_for_its_proofs_and_not_the_token() -> None:
    assert unit_value("router", "UnsetEnvironment") == CONTROL_TOKEN
    assert f"\n{WORKER_PROOF_KEY}=\n" in (SYSTEMD / "pdserve.env").read_text()


def test_units_let_only_this_host_reach_a_server() -> None:
    for role in ("prefill", "decode"):
        assert unit_value(role, "IPAddressDeny") == "any" and unit_value(role, "IPAddressAllow") == "localhost"


@pytest.fixture
def runnable_units(tmp_path: Path) -> list[str]:
    """The units with an interpreter that exists here, as systemd checks that."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for path in SYSTEMD.glob("pdserve*"):
        if path.suffix in (".service", ".target"):
            (tmp_path / path.name).write_text(path.read_text().replace("/opt/pdserve/.venv/bin/python", sys.executable))
    return sorted(str(path) for path in tmp_path.iterdir())


def test_systemd_finds_nothing_wrong_with_the_units(runnable_units: list[str]) -> None:
    command = ["systemd-analyze", "verify", "--man=no", *runnable_units]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in done.stderr.splitlines() if "pdserve" in line]
    assert (done.returncode, ours) == (0, [])


def test_systemd_finds_the_units_well_closed(runnable_units: list[str]) -> None:
    units = [path for path in runnable_units if path.endswith(".service")]
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={WORST_EXPOSURE}", *units]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd cannot judge units that are not installed")
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if "Overall" in line]


def test_the_script_for_one_machine_starts_what_the_programs_understand(tmp_path: Path) -> None:
    stub, log = tmp_path / "python", tmp_path / "log"
    log.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    env = os.environ | {"PYTHON": str(stub), "STUB_LOG": str(log)}
    script = ["bash", str(CONFIGS / "local_1p1d.sh")]
    subprocess.run(script, env=env, timeout=30, check=False, capture_output=True)
    configs = [parse_command(path.read_text().splitlines()) for path in sorted(log.iterdir())]
    assert sorted(type(config).__name__ for config in configs) == ["RouterConfig", "ServerConfig", "ServerConfig"]


@pytest.mark.parametrize("page", ["README.md", "docs/deploying.md", "configs/two_hosts.env"])
def test_commands_in_pages_are_understood(page: str) -> None:
    found = [parse_command(words) for words in documented_commands((ROOT / page).read_text())]
    assert found, "no command found: the pattern has come apart from the page"
