"""`pdserve doctor` against a service that answers as a router: each planted defect is found, and nothing else."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.doctor import main
from pdserve.errors import ConfigError
from tests.fleet_service import FleetService


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetService]:
    for name in ("PDSERVE_API_KEY", "PDSERVE_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    made = FleetService()
    yield made
    made.close()


def diagnosed(service: FleetService, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = main([service.url, "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def test_a_healthy_pair_has_no_findings(service: FleetService, capsys: pytest.CaptureFixture[str]) -> None:
    status, told = diagnosed(service, capsys)
    assert (status, told["findings"], told["healthy"]) == (0, [], True)
    assert [one["role"] for one in told["servers"]] == ["prefill", "decode"]
    assert main([service.url]) == 0
    assert "1 prefill, 1 decode" in capsys.readouterr().out


def test_a_server_alone_is_checked_too(service: FleetService, capsys: pytest.CaptureFixture[str]) -> None:
    service.alone = True
    status, told = diagnosed(service, capsys)
    assert (status, told["findings"]) == (0, [])
    assert [one["role"] for one in told["servers"]] == ["decode"]


def state_of(service: FleetService, url: str) -> dict[str, Any]:
    found: dict[str, Any] = service.infos[url]["internal_states"][0]
    return found


def _dead(s: FleetService) -> None:
    s.workers[0] |= {"is_healthy": False, "last_error": "connection refused"}


def _tokens_differ(s: FleetService) -> None:
    s.infos[s.decode]["control_token_id"] = "12345678"


def _token_missing(s: FleetService) -> None:
    s.infos[s.decode]["control_token_id"] = "none"


def _unreadable(s: FleetService) -> None:
    s.infos[s.prefill] = {"error": "status 401"}


def _clock(s: FleetService) -> None:
    s.infos[s.prefill]["host_facts"]["time_s"] = time.time() - 3600.0


def _bootstrap_port(s: FleetService) -> None:
    s.infos[s.prefill]["disaggregation_bootstrap_port"] = 1


def _tcp(s: FleetService) -> None:
    for info in s.infos.values():
        info["facts"]["transfer_protocol"] = "tcp"


def _rdma(s: FleetService, named: str | None, ports: dict[str, str]) -> None:
    info = s.infos[s.decode]
    info["disaggregation_ib_device"], info["host_facts"]["rdma_ports"] = named, ports
    for one in s.infos.values():
        one["facts"]["transfer_protocol"] = "rdma"


def _two_transports(s: FleetService) -> None:
    s.infos[s.decode]["disaggregation_transfer_backend"] = "auto"
    s.infos[s.decode]["facts"] |= {"transfer_backend": "shm", "transfer_protocol": "memory"}


def _handshake(s: FleetService) -> None:
    refusal = "pdserve_version: peer differs"
    state_of(s, s.decode)["facts"]["last_handshake_refusal"] = f"127.0.0.1:9: {refusal}"
    s.pairs[0] |= {"serving": False, "error": f"status 503, handshake_refused: the probe failed: {refusal}"}


def _all_clocks(s: FleetService) -> None:
    for info in s.infos.values():
        info["host_facts"]["time_s"] += 60.0


def _waiting(s: FleetService) -> None:
    state = state_of(s, s.decode)
    state["num_queue_reqs"], state["facts"]["memory_wait_s"] = 9, 7.0


def _full(s: FleetService) -> None:
    state_of(s, s.decode).update(memory={"pages_total": 100, "pages_free": 0, "pages_evictable": 1}, num_queue_reqs=9)


DEFECTS: dict[str, tuple[Callable[[FleetService], object], list[tuple[str, str]], str]] = {
    "dead": (_dead, [("error", "no_server"), ("error", "dead")], "connection refused"),
    "drain": (
        lambda s: s.workers[1].update(draining=True), [("error", "no_server"), ("note", "draining")],
        "every healthy decode server is draining",
    ),
    "breaker": (lambda s: s.workers[1].update(breaker="open"), [("warning", "breaker")], "circuit breaker open"),
    "serving": (lambda s: s.router.update(serving=False), [("error", "not_serving")], "cannot serve"),
    "pair": (lambda s: s.pairs[0].update(serving=False, error="x"), [("error", "pair")], "no token passes"),
    "keys": (_unreadable, [("error", "unreadable")], "status 401"),
    "tokens": (_tokens_differ, [("error", "control_token")], "different control tokens"),
    "token missing": (_token_missing, [("error", "control_token")], "have no control token, the others"),
    "no such NIC": (
        lambda s: _rdma(s, "mlx5_0, mlx5_9", {"mlx5_0:1": "ACTIVE"}), [("error", "nic")],
        "names mlx5_9, and the host has mlx5_0",
    ),
    "a named NIC is down": (
        lambda s: _rdma(s, "mlx5_0", {"mlx5_0:1": "DOWN", "mlx5_1:1": "ACTIVE"}), [("error", "nic")],
        "no port of mlx5_0 is ACTIVE: port 1 is DOWN",
    ),
    "any NIC is down": (
        lambda s: _rdma(s, None, {"mlx5_0:1": "ARMED"}), [("error", "nic")], "no port of mlx5_0 is ACTIVE",
    ),
    "versions": (lambda s: s.infos[s.decode].update(version="9"), [("error", "versions")], "versions differ: "),
    "version of the router": (lambda s: s.router.update(version="9"), [("warning", "versions")], "9 at router http"),
    "clock": (_clock, [("warning", "clocks")], "s behind"),
    "clock here": (_all_clocks, [("note", "clocks")], "apart from the clock of this host"),
    "port": (_bootstrap_port, [("warning", "port")], "bootstrap port 127.0.0.1:1"),
    "weights": (
        lambda s: s.infos[s.decode]["facts"].update(weights_fingerprint="x"), [("error", "kv")], "weights differs"
    ),
    "vocabulary": (lambda s: s.infos[s.decode].update(vocab_size=1), [("error", "model")], "vocab_size differs"),
    "page size": (
        lambda s: s.infos[s.decode]["facts"].update(page_tokens=64), [("error", "kv")], "page size in tokens differs"
    ),
    "KV dtype": (lambda s: s.infos[s.decode].update(kv_cache_dtype="fp8"), [("error", "flags")], "kv_cache_dtype"),
    "name": (lambda s: s.infos[s.decode].update(served_model_name="n"), [("warning", "service")], "served_model_name"),
    "transport": (
        lambda s: s.infos[s.decode]["facts"].update(transfer_backend="nixl"), [("error", "transport")], "nixl"
    ),
    "transports by auto": (_two_transports, [("error", "transport")], "'mooncake' at http"),
    "refused pair": (_handshake, [("error", "pair")], "peer differs"),
    "token at router": (
        lambda s: s.workers[0].update(is_healthy=False, last_error="x does not prove the control token"),
        [("error", "no_server"), ("error", "dead")], "control token",
    ),
    "NIC": (_tcp, [("warning", "nic")] * 2, "RDMA devices: mlx5_0"),
    "memory": (
        lambda s: s.infos[s.decode]["host_facts"].update(memory_available_bytes=1 << 20),
        [("warning", "host_memory")], "0.00 of 16.0 GiB",
    ),
    "pool": (_full, [("warning", "kv_full")], "1 of 100 KV pages"),
    "memory wait": (_waiting, [("warning", "kv_full")], "9 requests wait, the first one 7 s for KV memory"),
    "quarantine": (
        lambda s: state_of(s, s.decode).update(oldest_orphan_s=99.0), [("warning", "quarantine")], "since 99 s"
    ),
    "audit": (lambda s: state_of(s, s.decode).update(audit=["2 pages lost"]), [("error", "audit")], "2 pages lost"),
    "peer": (
        lambda s: state_of(s, s.decode)["peers"][0].update(state="silent"), [("warning", "peer")], "is silent"
    ),
    "handshake": (
        lambda s: state_of(s, s.decode)["facts"].update(last_handshake_refusal="num_layers"),
        [("warning", "handshake")], "num_layers",
    ),
    "replica": (
        lambda s: s.infos[s.decode]["replica_health"][0].update(trouble="a step is stuck"),
        [("error", "replica")], "a step is stuck",
    ),
    "flag": (lambda s: s.infos[s.decode].update(sleep_on_idle=True), [("note", "no_effect")], "--sleep-on-idle has"),
    "failures": (lambda s: state_of(s, s.decode).update(failures={"timeout": 2}), [("note", "failures")], "2 timeout"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found_with_place_and_remedy(
    service: FleetService, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    plant, expected, text = DEFECTS[name]
    plant(service)
    status, told = diagnosed(service, capsys)
    found = told["findings"]
    assert [(one["severity"], one["check"]) for one in found] == expected
    assert any(text in one["what"] for one in found)
    assert all(one["where"] and one["fix"] for one in found)
    assert status == (0 if all(severity == "note" for severity, _ in expected) else 1)


def test_a_deployment_that_does_not_answer_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:1", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["check"] == "unreachable"
    assert main(["http://127.0.0.1:1"]) == 1
    assert "error  unreachable" in capsys.readouterr().out


def test_a_wrong_key_is_told_and_the_right_one_suffices(
    service: FleetService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.keys = ("right",)
    status, told = diagnosed(service, capsys, "--api-key", "wrong")
    assert status == 1
    assert told["findings"][0]["check"] == "key"
    assert "--api-key" in told["findings"][0]["fix"]
    assert diagnosed(service, capsys, "--api-key", "right")[0] == 0


@pytest.mark.parametrize("path", ["/workers", "/observe", "/get_server_info"])
@pytest.mark.parametrize(
    "answer",
    [
        {"workers": [5, None, {"url": "u"}], "router": [1], "pairs": [1], "edges": "x"},
        {"workers": [{"url": "http://u:1", "observed": [1]}], "router": {"serving": 1}, "prefill": [{"url": []}]},
        {"facts": {"kv": 1}, "internal_states": [{"memory": [1], "facts": [2], "peers": [3]}], "host_facts": "x"},
        {"replica_health": 5, "host_facts": {"rdma_devices": 5, "time_s": "x"}, "disaggregation_mode": "prefill"},
        {"host_facts": {"rdma_devices": [], "rdma_ports": [1]}, "disaggregation_ib_device": 7},
    ],
)
def test_an_answer_of_another_form_is_a_finding(
    service: FleetService, path: str, answer: object, capsys: pytest.CaptureFixture[str]
) -> None:
    service.alone = path == "/get_server_info"
    service.texts[path] = json.dumps(answer)
    status, report = diagnosed(service, capsys)
    assert status == 1 or report["healthy"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["nonsense"], "the address is 'nonsense'"),
        (["http://[::1"], "the address is 'http://"),
        (["http://127.0.0.1:99999"], "the address is 'http://127.0.0.1:99999'"),
        (["https://127.0.0.1:1", "--ca-cert", "/nowhere.pem"], "--ca-cert /nowhere.pem: there is no such file"),
    ],
)
def test_a_wrong_command_line_is_refused_by_its_field(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        main(flags)
    assert told in str(refused.value)


def test_a_password_in_the_address_is_sent_and_not_told(
    service: FleetService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.keys = ("Basic dXNlcjpzZWNyZXQtOQ==",)
    url = service.url.replace("http://", "http://user:secret-9@")
    for keys, read in ((service.keys, True), (("another",), False)):
        service.keys = keys
        main([url, "--json"])
        told = capsys.readouterr().out
        assert bool(json.loads(told)["servers"]) is read and "secret-9" not in told
    with pytest.raises(ConfigError) as refused:
        main(["ftp://user:secret-9@a"])
    assert "secret-9" not in str(refused.value)


def test_a_certificate_that_is_not_trusted_is_told(
    service: FleetService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1", "-out", "cert.pem"]
    subprocess.run([*command, "-keyout", "key.pem"], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    service.use_tls(tmp_path / "cert.pem", tmp_path / "key.pem")
    status, told = diagnosed(service, capsys)
    (found,) = told["findings"]
    assert (status, found["check"]) == (1, "unreachable")
    assert "no TLS connection" in found["what"] and "self-signed" in found["what"] and "--ca-cert" in found["fix"]
    status, told = diagnosed(service, capsys, "--ca-cert", str(tmp_path / "cert.pem"))
    assert told["servers"]
