"""The local service starts its parts in order, hands them what they need, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.startup_mistakes import CONFIG
from pdserve import launch_local
from pdserve.base import cpu_affinity as cores
from pdserve.base.nice_scope import NiceScope
from pdserve.config.access_group import ProofRule
from pdserve.config.cli import flags, parse_server_args
from pdserve.config.local_access import ROUTER_FIELDS, Role, flags_for, role_of
from pdserve.config.resolve import Machine, fill_in
from pdserve.errors import ConfigError
from pdserve.http.session_proof import worker_secret
from pdserve.launch_local import (
    LocalConfig,
    check,
    child_env,
    config_from,
    parse_servers,
    router_argv,
    router_env,
    server_argv,
)
from pdserve.router.config.flags import config_from as routers_config
from pdserve.router.config.flags import make_parser as router_parser

EXIT_S = 20.0
TLS = "--ssl-certfile {0}/cert.pem --ssl-keyfile {0}/key.pem --ssl-ca-certs {0}/cert.pem"
FAKE_PART = """
import json, os, signal, sys
argv = sys.argv[1:]
role = argv[argv.index("--disaggregation-mode") + 1] if "--disaggregation-mode" in argv else "router"
names = ["PDSERVE_CONTROL_TOKEN", "OMP_NUM_THREADS", "PDSERVE_API_KEY", "PDSERVE_ADMIN_API_KEY"]
facts = {"pid": os.getpid(), "argv": argv, "role": role}
facts["env"] = {k: os.environ.get(k) for k in names}
print("facts " + json.dumps(facts), flush=True)
if "--fail-" + role in argv:
    sys.exit("no such model")
ready = {"role": role, "url": f"http://127.0.0.1:{os.getpid()}", "bootstrap_port": 77 if role == "prefill" else None}
print("PDSERVE_READY " + json.dumps(ready), flush=True)
signal.pause()
"""
MAIN = """
import sys
from pdserve.launch_local import LocalService, config_from, serve
part = [sys.executable, "-c", sys.argv[1]]
sys.exit(serve(LocalService(config_from(sys.argv[2:]), server_command=part, router_command=part)))
"""


@contextlib.contextmanager
def service(logs: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", MAIN, FAKE_PART, "--model-path", "m", "--log-dir", str(logs), *flags]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_servers_are_pinned_to_cores_that_no_other_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "granted_cores", lambda: frozenset(range(8)))
    config = LocalConfig(model_path="m", num_prefill=1, num_decode=2, cpu_pin="7,0-5")
    pins = []
    for role, index in (("prefill", 0), ("decode", 0), ("decode", 1)):
        kernels = parse_server_args(server_argv(config, "prefill" if role == "prefill" else "decode", index)).kernels
        pins.append((kernels.cpu_pin, kernels.cpu_threads))
    assert pins == [("7,0", 2), ("1,2", 2), ("3,4", 2)]
    for wrong in ("0,1", "0-9", "x"):
        with pytest.raises(ConfigError) as caught:
            LocalConfig(model_path="m", num_prefill=1, num_decode=2, cpu_pin=wrong)
        assert caught.value.field == "cpu_pin"
    with pytest.raises(ConfigError, match="too few cores, 9 are needed"):
        LocalConfig(model_path="m", num_prefill=1, num_decode=2, cpu_threads=3, cpu_pin="auto")
    assert "--cpu-pin" not in server_argv(LocalConfig(model_path="m"), "decode")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_servers_believe_their_router_whose_a_request_is(role: Role) -> None:
    access = parse_server_args(server_argv(LocalConfig(model_path="m"), role)).access
    assert any(ipaddress.ip_address("127.0.0.1") in network for network in access.proxies)


def test_prefill_gives_way_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})

    def niceness(config: LocalConfig, role: Role) -> int:
        return parse_server_args(server_argv(config, role)).kernels.cpu_nice

    plain = LocalConfig(model_path="m")
    assert (niceness(plain, "prefill"), niceness(plain, "decode")) == (5, 0)
    assert niceness(LocalConfig(model_path="m", niceness=7), "prefill") == 7
    more_threads_than_cores = LocalConfig(model_path="m", num_decode=2)
    assert niceness(more_threads_than_cores, "prefill") == 0
    for told in (
        LocalConfig(model_path="m", prefill_flags=("--cpu-nice", "3"), decode_flags=("--cpu-nice", "2")),
        LocalConfig(model_path="m", server_flags=("--cpu-nice", "3"), decode_flags=("--cpu-nice=2",)),
    ):
        assert (niceness(told, "prefill"), niceness(told, "decode")) == (3, 2)


def lines_until_ready(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith("ready: "):
            return lines
    raise AssertionError(f"ended before it was ready: {lines}")


def facts(logs: Path) -> dict[str, dict[str, object]]:
    """What each part that got as far as saying so was started with, by name."""
    return {
        path.stem: json.loads(line.removeprefix("facts "))
        for path in logs.iterdir()
        for line in path.read_text().splitlines()
        if line.startswith("facts ")
    }


def none_left(logs: Path) -> bool:
    return not any(Path(f"/proc/{part['pid']}").exists() for part in facts(logs).values())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_every_part(tmp_path: Path, signum: signal.Signals) -> None:
    with service(tmp_path, "--prefill", "2", "--router-port", "0", "--page-size", "64") as process:
        lines = lines_until_ready(process)
        parts = facts(tmp_path)
        assert sorted(parts) == ["decode-0", "prefill-0", "prefill-1", "router"]
        assert [line.split()[0] for line in lines[:-1]] == ["prefill-0", "prefill-1", "decode-0", "router"]
        assert lines[-1] == f"ready: OPENAI_BASE_URL=http://127.0.0.1:{parts['router']['pid']}/v1 OPENAI_API_KEY=none"
        argv = parts["router"]["argv"]
        assert isinstance(argv, list)
        for name in ("prefill-0", "prefill-1"):
            at = argv.index(f"http://127.0.0.1:{parts[name]['pid']}")
            assert argv[at - 1 : at + 2 : 2] == ["--prefill", "77"]
        for name in ("prefill-0", "decode-0"):
            argv = parts[name]["argv"]
            assert isinstance(argv, list) and argv[-2:] == ["--page-size", "64"]
        router = parts.pop("router")["env"]
        assert isinstance(router, dict) and router["PDSERVE_CONTROL_TOKEN"] is None
        assert len({json.dumps(part["env"]) for part in parts.values()}) == 1
        process.send_signal(signum)
        assert process.wait(EXIT_S) == 0
        assert none_left(tmp_path)


@pytest.mark.parametrize(
    ("scope", "niceness", "own_session"),
    [(NiceScope.SESSION, 5, True), (NiceScope.OWN_CGROUP, 5, False), (NiceScope.SHARED, 3, False)],
)
def test_the_niceness_ranks_our_own_processes(
    monkeypatch: pytest.MonkeyPatch, scope: NiceScope, niceness: int, own_session: bool
) -> None:
    sessions: list[int] = []
    started: list[int] = []

    def in_own_session(run: Callable[[], int]) -> int:
        sessions.append(run())
        return sessions[-1]

    def serve(config: LocalConfig) -> int:
        started.append(config.prefill_niceness)
        return 3

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(launch_local, "nice_scope", lambda: scope)
    monkeypatch.setattr(launch_local, "in_own_session", in_own_session)
    monkeypatch.setattr(launch_local, "LocalService", lambda config: config)
    monkeypatch.setattr(launch_local, "serve", serve)
    monkeypatch.setattr(launch_local, "check", lambda config, servers: None)
    assert launch_local.main(["--model-path", "m"]) == 3
    assert (started, sessions) == ([niceness], [3] if own_session else [])
    assert launch_local.main(["--model-path", "m", "--decode", "2"]) == 3
    assert (started, sessions) == ([niceness, 0], [3] if own_session else []), "more threads than cores: no niceness"


def test_a_part_that_dies_ends_the_service_with_an_error(tmp_path: Path) -> None:
    with service(tmp_path) as process:
        lines_until_ready(process)
        os.kill(int(str(facts(tmp_path)["decode-0"]["pid"])), signal.SIGKILL)
        assert process.wait(EXIT_S) == 1
        assert process.stdout is not None and "decode-0" in process.stdout.read()
        assert none_left(tmp_path)


def test_keep_going_outlives_a_part(tmp_path: Path) -> None:
    with service(tmp_path, "--keep-going") as process:
        lines_until_ready(process)
        os.kill(int(str(facts(tmp_path)["decode-0"]["pid"])), signal.SIGKILL)
        assert process.stdout is not None and "decode-0" in process.stdout.readline()
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(EXIT_S) == 0
        assert none_left(tmp_path)


def test_a_part_that_cannot_start_is_reported_and_the_others_end(tmp_path: Path) -> None:
    with service(tmp_path, "--fail-decode") as process:
        assert process.wait(EXIT_S) == 1
        assert process.stderr is not None and "decode-0" in process.stderr.read()
        assert "no such model" in (tmp_path / "decode-0.log").read_text()
        assert none_left(tmp_path)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's configuration, and a certificate whose key has a password. The environment is as before afterwards."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem", "-passout", "pass:sesame"]
    subprocess.run(command, check=True, capture_output=True, timeout=30, cwd=tmp_path)
    for name in ("PDSERVE_API_KEY", "PDSERVE_ADMIN_API_KEY", "PDSERVE_SSL_KEYFILE_PASSWORD", "PDSERVE_CONTROL_TOKEN"):
        monkeypatch.setenv(name, "")
    return tmp_path


def check_flags(files: Path, flags: str) -> None:
    common = ["--model-path", str(files), "--load-format", "dummy", "--router-port", "0"]
    config = config_from([*common, *flags.format(files).split()])
    check(config, parse_servers(config))


@pytest.mark.parametrize(
    "flags",
    [
        f"{TLS} --ssl-keyfile-password sesame",
        "--require-control-proof --api-key key --admin-api-key root",
        "--disaggregation-transfer-backend shm --disaggregation-layerwise-transfer --log-level warning",
        "--prefill 2 --tp-size 2 --decode-flags=--disaggregation-decode-enable-radix-cache",
    ],
)
def test_right_flags_are_not_refused(files: Path, flags: str) -> None:
    check_flags(files, flags)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (TLS, "and its password"),
        ("--tp-size 3", "does not divide the model's 4 attention heads"),
        ("--prefil 2", "did you mean --prefill"),
        ("--context-length 9999", "context_length must be in"),
        ("--disaggregation-bootstrap-port 1", "launch_local chooses --disaggregation-bootstrap-port .*; leave it out"),
        ("--port 9000", "launch_local chooses --port of each server itself; give --router-port for the service"),
        ("--prot 9000", r"--prot: there is no such flag; did you mean --router-port or --router-host or --tp\?"),
    ],
)
def test_wrong_flags_are_refused_before_a_part_starts(files: Path, flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_flags(files, flags)


def test_cores_are_divided_and_the_secret_is_fresh() -> None:
    config = LocalConfig(model_path="m")
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert config.threads_per_server == share
    assert f"--cpu-threads {share}" in " ".join(server_argv(config, "decode"))
    first, second = child_env(config, {"A": "1"}), child_env(config, {})
    assert first["A"] == "1" and first["OMP_NUM_THREADS"] == str(share)
    assert len(first["PDSERVE_CONTROL_TOKEN"]) == 64
    assert first["PDSERVE_CONTROL_TOKEN"] != second["PDSERVE_CONTROL_TOKEN"]
    assert child_env(config, {"PDSERVE_CONTROL_TOKEN": "mine"})["PDSERVE_CONTROL_TOKEN"] == "mine"


def test_the_router_has_a_key_for_its_proofs_and_not_the_token() -> None:
    theirs = {"PDSERVE_CONTROL_TOKEN": "mine", "PDSERVE_WORKER_PROOF_KEY": "of another service"}
    servers = child_env(LocalConfig(model_path="m"), theirs)
    assert "PDSERVE_WORKER_PROOF_KEY" not in servers
    router = router_env(servers)
    assert router["PDSERVE_WORKER_PROOF_KEY"] == worker_secret("mine").hex()
    assert "PDSERVE_CONTROL_TOKEN" not in router
    assert not {"PDSERVE_CONTROL_TOKEN", "PDSERVE_WORKER_PROOF_KEY"} & router_env({"PDSERVE_CONTROL_TOKEN": ""}).keys()


def test_keys_go_to_all_parts_through_the_environment(tmp_path: Path) -> None:
    with service(tmp_path, "--api-key", "k1,k2", "--admin-api-key=root", "--cors-allowed-origins", "*") as process:
        assert lines_until_ready(process)[-1].endswith("OPENAI_API_KEY=YOUR_KEY")
        parts = facts(tmp_path)
    for name, part in parts.items():
        env, argv = part["env"], part["argv"]
        assert isinstance(env, dict) and isinstance(argv, list)
        assert (env["PDSERVE_API_KEY"], env["PDSERVE_ADMIN_API_KEY"]) == ("k1,k2", "root")
        assert not {"k1,k2", "root"} & set(argv)
        assert ("--cors-allowed-origins" in argv) == (name == "router")


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ([], ProofRule.UNLESS_KEY),
        (["--api-key", "k1"], ProofRule.OPTIONAL),
        (["--api-key", "k1", "--require-control-proof"], ProofRule.ALWAYS),
        (["--no-require-control-proof"], ProofRule.OPTIONAL),
    ],
)
def test_servers_take_the_router_only_unless_they_have_a_key(
    flags: list[str], rule: ProofRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "k1" if "--api-key" in flags else "")
    config = config_from(["--model-path", "m", *flags])
    for role in ROLES:
        assert parse_server_args(server_argv(config, role)).access.proof_rule(has_token=True) is rule


def test_clients_see_the_routers_certificate_and_servers_have_it_where_authorities_are_given() -> None:
    both = ["--ssl-certfile", "c", "--ssl-keyfile", "k"]
    config = config_from(both)
    assert config.access.router_flags == ["--tls-cert-path", "c", "--tls-key-path", "k"]
    assert "--ssl-certfile" not in server_argv(config, "prefill")
    config = config_from([*both, "--ssl-ca-certs", "a", "--max-concurrent-requests-per-client", "3"])
    assert {"--ca-cert-paths", "a", "--max-concurrent-requests-per-client", "3"} <= set(config.access.router_flags)
    for role in ROLES:
        argv = server_argv(config, role)
        assert argv[argv.index("--ssl-certfile") :][:4] == both
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        config_from(["--ssl-ca-certs", "a"])
    with pytest.raises(ConfigError, match="need each other"):
        config_from(["--ssl-keyfile", "k"])
    assert "k1" not in repr(config_from(["--api-key", "k1"]))


def test_the_router_gets_its_own_flags_and_those_of_servers_that_are_its_as_well() -> None:
    where = ["--otlp-traces-endpoint", "collector:4318"]
    given = ["--enable-trace", *where, "--max-request-bytes=9000", "--page-size", "4"]
    config = config_from([*given, "--router-flags", "--queue-size 7 --policy random"])
    argv = router_argv(config, [], [])
    router = routers_config(router_parser().parse_args(argv))
    assert router.otlp_traces_endpoint == "collector:4318"
    assert (router.max_request_bytes, router.limits.queue_size, router.policies.policy) == (9000, 7, "random")
    for role in ROLES:
        observe = parse_server_args(server_argv(config, role)).observe
        assert (observe.enable_trace, observe.otlp_traces_endpoint) == (True, "collector:4318")
    assert "--enable-trace" not in router_argv(config_from(["--no-enable-trace"]), [], [])


@pytest.mark.parametrize("field", sorted(ROUTER_FIELDS))
def test_what_the_router_takes_of_the_servers_flags_both_have(field: str) -> None:
    name = "--" + field.replace("_", "-")
    assert any(flag.field == field and name in flag.names for flag in flags())
    assert name in router_parser().format_help()


@pytest.mark.parametrize(
    "extra", [["--port", "1"], ["--host=0.0.0.0"], ["--disaggregation-mode", "null"], ["--prefill", "0"]]
)
def test_flags_that_belong_to_the_service_are_refused(extra: list[str]) -> None:
    with pytest.raises(ConfigError):
        config_from(["--model-path", "m", *extra])


ROLES: tuple[Role, Role] = ("prefill", "decode")


@pytest.mark.parametrize(
    ("given", "prefill", "decode"),
    [
        ("--disaggregation-layerwise-transfer", True, False),
        ("--no-disaggregation-layerwise-transfer", True, False),
        ("--disaggregation-layerwise-groups 2", True, False),
        ("--disaggregation-layerwise-groups=2", True, False),
        ("--disaggregation-decode-enable-radix-cache", False, True),
        ("--no-disaggregation-decode-enable-radix-cache", False, True),
        ("--disaggregation-decode-retraction-backup cpu_tensor", False, True),
        ("--disaggregation-decode-offload-gb 1.5", False, True),
        ("--num-reserved-decode-tokens=64", False, True),
        ("--mixed-chunk-size 64", False, True),
        ("--page-size 64", True, True),
        ("--chunked-prefill-size -1", True, True),
        ("--enable-deterministic-inference", True, True),
        ("--disaggregation-transfer-backend=fake", True, True),
    ],
)
def test_a_flag_reaches_the_role_it_concerns_with_its_value(given: str, prefill: bool, decode: bool) -> None:
    around = ["--context-length", "512", *given.split(), "--dtype=float32"]
    without = ["--context-length", "512", "--dtype=float32"]
    assert flags_for("prefill", around) == (around if prefill else without)
    assert flags_for("decode", around) == (around if decode else without)


def test_every_flag_of_one_role_can_be_given_and_both_servers_accept_their_share() -> None:
    given = [
        word
        for flag in flags()
        if role_of(flag.field) is not None
        for word in ([flag.names[0]] if flag.kind is bool else [flag.names[0], str(flag.default or 1)])
    ]
    needed = ["--hicache-storage-backend", "memory"]  # --disaggregation-decode-enable-offload-kvcache needs it
    config = config_from(["--model-path", "m", "--cpu-threads", "1", *needed, *given])
    for role in ROLES:
        resolved, _ = fill_in(parse_server_args(server_argv(config, role)), Machine(has_cuda=False, num_cores=2))
        assert resolved.disagg.disaggregation_layerwise_transfer is (role == "prefill")
        assert resolved.disagg.disaggregation_decode_enable_radix_cache is (role == "decode")


def test_both_roles_may_have_a_flag_with_different_values() -> None:
    config = config_from(["--model-path", "m", "--prefill-flags=--tp-size 2", "--decode-flags", "--pp-size 2 --dp 3"])
    sizes = {role: parse_server_args(server_argv(config, role)).parallel for role in ROLES}
    assert (sizes["prefill"].tp_size, sizes["prefill"].pp_size, sizes["prefill"].dp_size) == (2, 1, 1)
    assert (sizes["decode"].tp_size, sizes["decode"].pp_size, sizes["decode"].dp_size) == (1, 2, 3)
    with pytest.raises(ConfigError, match="--port"):
        config_from(["--prefill-flags=--port 5"])


def test_what_is_no_flag_reaches_every_server_which_refuses_it() -> None:
    for argv in (["--bogus", "5"], ["stray"], ["--disaggregation-decode-bogus=1"], ["--page-size"]):
        for role in ROLES:
            assert flags_for(role, argv) == argv


def test_a_value_that_is_missing_does_not_take_the_next_flag_along() -> None:
    argv = ["--num-reserved-decode-tokens", "--page-size", "64"]
    assert flags_for("prefill", argv) == ["--page-size", "64"]
    assert flags_for("decode", argv) == argv


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ([], "least_loaded"),
        (["--disaggregation-decode-enable-radix-cache"], "consistent_hashing"),
        (["--disaggregation-decode-enable-radix-cache", "--policy", "random"], "random"),
        (["--policy", "consistent_hashing"], "consistent_hashing"),
    ],
)
def test_the_router_keeps_conversations_in_place_where_decode_caches(flags: list[str], policy: str) -> None:
    assert config_from(["--model-path", "m", *flags]).policy == policy
