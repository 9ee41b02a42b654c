"""What a launcher prepares for a server that changes its role: ports, and what is refused before anything ends."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator

import pytest
import requests

from pdserve.config import DisaggMode, ServerConfig
from pdserve.config.cli import parse_server_args
from pdserve.config.resolve import disagg_fields, for_mode, resolve, with_disagg, without_effect
from pdserve.errors import ConfigError
from pdserve.launch_checks import check_storage
from pdserve.launch_server import Sides, reload_reason

BASE = ("--model-path", "m", "--port", "0", "--device", "cpu")


@contextlib.contextmanager
def sides(*flags: str) -> Iterator[tuple[Sides, ServerConfig]]:
    given = parse_server_args([*BASE, *flags])
    made = Sides(given)
    try:
        yield made, resolve(given)
    finally:
        made.end(told=False)


def answers(port: int | None) -> bool:
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 503
    return False


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_bootstrap_port_that_nobody_insisted_on_is_had_again_where_it_can() -> None:
    with sides("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0") as (made, config):
        first = made.add(config)
        assert answers(first.bootstrap_port)
        decode = made.other("decode")
        assert decode.bootstrap_port is None and decode.role == "decode"
        first.end()
        assert not answers(first.bootstrap_port)
        second = made.other("prefill")
        assert second.bootstrap_port == first.bootstrap_port and answers(second.bootstrap_port)
        assert second.config.disagg.disaggregation_bootstrap_port == second.bootstrap_port


def test_a_port_that_is_taken_is_refused_where_it_was_given_and_passed_over_where_not(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sides("--disaggregation-mode", "decode", "--disaggregation-bootstrap-port", str(taken)) as (made, config):
        made.add(config)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{taken}"):
            made.other("prefill")
    monkeypatch.setattr("pdserve.config.resolve.BOOTSTRAP_PORT", taken)
    with sides("--disaggregation-mode", "decode") as (made, config):
        made.add(config)
        prefill = made.other("prefill")
        assert prefill.bootstrap_port not in (None, taken) and answers(prefill.bootstrap_port)


def test_servers_over_several_hosts_keep_their_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CONTROL_TOKEN", "secret")
    flags = ("--nnodes", "2", "--tp-size", "2", "--dist-init-addr", "127.0.0.1:20000")
    with sides("--disaggregation-mode", "decode", *flags) as (made, config):
        made.add(config)
        with pytest.raises(ConfigError, match="--nnodes") as caught:
            made.other("prefill")
        assert caught.value.field == "nnodes"


def test_a_server_that_listens_everywhere_must_have_said_where_it_is() -> None:
    with sides("--host", "0.0.0.0") as (made, config):
        made.add(config)
        with pytest.raises(ConfigError, match="--disaggregation-host"):
            made.other("decode")


def test_an_engine_is_reloaded_where_its_pool_is_not_in_shared_memory_and_a_role_needs_it() -> None:
    def resolved(mode: DisaggMode, *flags: str) -> ServerConfig:
        return resolve(for_mode(parse_server_args([*BASE, *flags]), mode))

    shm = ("--disaggregation-transfer-backend", "shm")
    with_shm, null = resolved("decode", *shm), resolved("null")
    assert reload_reason(null, null, with_shm) == (
        "shm needs a KV pool in shared memory, but no --disaggregation-transfer-backend was given"
    )
    named = resolved("null", *shm)
    assert reload_reason(named, named, with_shm) is None, "the pool is shared from the start"
    assert reload_reason(with_shm, with_shm, named) is None
    other = dataclasses.replace(with_shm, memory=dataclasses.replace(with_shm.memory, page_size=32))
    assert reload_reason(with_shm, with_shm, other) is not None


def test_a_server_with_a_store_takes_roles_without_a_prefix_cache_and_is_reloaded_for_its_first_host_tier() -> None:
    store = ("--enable-hierarchical-cache", "--hicache-storage-backend", "file")
    given = parse_server_args([*BASE, *store, "--disaggregation-mode", "prefill"])
    prefill, decode = given, for_mode(given, "decode")
    check_storage(prefill)
    with pytest.raises(ConfigError) as caught:
        check_storage(decode)
    assert caught.value.field == "hicache_storage_backend", "a server does not start so"
    prefill, decode = resolve(prefill), resolve(decode)
    assert "--enable-hierarchical-cache has no effect: the server has no prefix cache" in without_effect(decode)
    assert reload_reason(prefill, prefill, decode) is None
    assert reload_reason(decode, prefill, prefill) is None, "the tier is still there"
    assert "host tier" in (reload_reason(decode, decode, prefill) or "")


def test_a_rank_on_another_host_keeps_its_own_address() -> None:
    told = disagg_fields(resolve(for_mode(parse_server_args([*BASE, "--host", "10.0.0.1"]), "decode")))
    assert with_disagg(parse_server_args(BASE), told).disagg.disaggregation_host == "10.0.0.1"
    flags = ("--nnodes", "2", "--node-rank", "1", "--tp-size", "2", "--dist-init-addr", "10.0.0.1:20000")
    for host, own, expected in (
        ("10.0.0.2", (), "10.0.0.2"),
        ("0.0.0.0", ("--disaggregation-host", "10.0.0.3"), "10.0.0.3"),
    ):
        config = with_disagg(parse_server_args([*BASE, *flags, "--host", host, *own]), told)
        assert config.disagg.disaggregation_host == expected
        assert config.disagg.disaggregation_mode == "decode"
    with pytest.raises(ConfigError, match="listens on all addresses") as caught:
        with_disagg(parse_server_args([*BASE, *flags, "--host", "0.0.0.0"]), told)
    assert caught.value.field == "disaggregation_host"
