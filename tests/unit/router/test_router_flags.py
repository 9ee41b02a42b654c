"""The router's command line: it reaches the configuration, and what cannot work is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.base.hosts import server_url
from pdserve.errors import ConfigError
from pdserve.launch_router import config_from, make_parser
from pdserve.router.config.config import (
    ProbeConfig,
    RouterConfig,
    WorkerRole,
    WorkerSpec,
    prefill_spec,
)
from pdserve.router.config.flags import UNSUPPORTED


@pytest.mark.parametrize(
    ("values", "port", "ask"),
    [(["http://h:1"], None, True), (["http://h:1", "none"], None, False), (["http://h:1/", "8998"], 8998, False)],
)
def test_prefill_takes_an_optional_port(values: list[str], port: int | None, ask: bool) -> None:
    assert prefill_spec(values) == WorkerSpec(
        role=WorkerRole.PREFILL, url="http://h:1", bootstrap_port=port, ask_bootstrap_port=ask
    )


@pytest.mark.parametrize("values", [["http://h:1", "0"], ["http://h:1", "x"], ["http://h:1", "70000"], ["a", "1", "2"]])
def test_bad_prefill_values_are_refused(values: list[str]) -> None:
    with pytest.raises(ConfigError):
        prefill_spec(values)


@pytest.mark.parametrize("text", ["", "h:1", "ftp://h", "http://", "http://h:x", "http://h:1/v1", "http://h:99999"])
def test_what_is_no_base_url_is_refused_by_flag_name(text: str) -> None:
    with pytest.raises(ConfigError, match="decode"):
        server_url(text, field="decode")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--prefill", "http://a:1", "--decode", "http://b:1"],
        ["--pd-disaggregation", "--prefill", "http://a:1"],
        ["--pd-disaggregation", "--prefill", "http://a:1", "--decode", "http://a:1"],
        ["--worker-urls", "http://a:1", "--pd-disaggregation", "--prefill", "http://b:1", "--decode", "http://c:1"],
        ["--worker-urls", "http://a:1", "--request-timeout", "nan"],
        ["--worker-urls", "http://a:1", "--max-tries", "0"],
        ["--worker-urls", "http://a:1", "--max-inflight", "0"],
        ["--worker-urls", "http://a:1", "--cache-threshold", "1.5"],
        ["--worker-urls", "http://a:1", "--queue-size", "-1"],
        ["--worker-urls", "http://a:1", "--retry-jitter-factor", "nan"],
        ["--worker-urls", "http://a:1", "--tls-cert-path", "cert.pem"],
        ["--worker-urls", "http://a:1", "--api-key", ""],
        ["--worker-urls", "http://a:1", "--health-check-endpoint", "health"],
    ],
)
def test_flags_that_contradict_each_other_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        config_from(make_parser().parse_args(argv))


def test_flags_reach_the_configuration() -> None:
    argv = "--pd-disaggregation --prefill http://a:1 8998 --prefill http://b:1 --decode http://c:1 --decode http://d:1"
    config = config_from(
        make_parser().parse_args([*argv.split(), "--policy", "least_loaded", "--request-timeout", "9"])
    )
    assert isinstance(config, RouterConfig)
    assert [spec.url[-3] for spec in config.workers] == ["a", "b", "c", "d"]
    assert (config.pd, config.policies.policy, config.request_timeout_s) == (True, "least_loaded", 9.0)


SGLANG = """
--pd-disaggregation --prefill http://a:1 8998 --decode http://b:1 --policy cache_aware --prefill-policy bucket
--decode-policy power_of_two --cache-threshold 0.5 --balance-abs-threshold 32 --balance-rel-threshold 1.1
--eviction-interval-secs 30 --max-tree-size 1000 --max-payload-size 1000 --request-id-headers x-a x-b
--request-timeout-secs 60 --shutdown-grace-period-secs 9 --max-concurrent-requests 64 --queue-size 7
--queue-timeout-secs 8 --retry-max-retries 4 --retry-initial-backoff-ms 100 --retry-max-backoff-ms 2000
--retry-backoff-multiplier 2 --retry-jitter-factor 0.1 --cb-failure-threshold 5 --cb-success-threshold 2
--cb-timeout-duration-secs 30 --cb-window-duration-secs 60 --health-failure-threshold 2 --health-success-threshold 3
--health-check-timeout-secs 4 --health-check-interval-secs 6 --health-check-endpoint /ready --log-level warn
--cors-allowed-origins http://c --bucket-adjust-interval-secs 3 --api-key k
"""


def test_the_flags_of_sglang_router_do_what_they_do_there() -> None:
    config = config_from(make_parser().parse_args(SGLANG.split()))
    policies, retry, breaker, health = config.policies, config.retry, config.breaker, config.health
    assert [policies.of(role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)] == ["bucket", "power_of_two"]
    assert (policies.cache_threshold, policies.balance_abs_threshold, policies.balance_rel_threshold) == (0.5, 32, 1.1)
    assert (policies.eviction_interval_s, policies.max_tree_size, policies.bucket_adjust_interval_s) == (30, 1000, 3)
    assert (retry.max_tries, retry.first_backoff_s, retry.max_backoff_s) == (4, 0.1, 2.0)
    assert (retry.multiplier, retry.jitter) == (2, 0.1)
    assert (breaker.failure_threshold, breaker.success_threshold) == (5, 2)
    assert (breaker.open_s, breaker.window_s, breaker.enabled) == (30, 60, True)
    assert (health.failure_threshold, health.success_threshold, health.endpoint) == (2, 3, "/ready")
    assert (health.timeout_s, health.interval_s) == (4, 6)
    assert (config.limits.max_concurrent_requests, config.limits.queue_size) == (64, 7)
    assert (config.limits.queue_timeout_s, config.limits.max_inflight) == (8, None)
    assert (config.access.request_id_headers, config.access.cors_allowed_origins) == (("x-a", "x-b"), ("http://c",))
    assert (config.max_request_bytes, config.request_timeout_s, config.shutdown_timeout_s) == (1000, 60, 9)


def test_switches_turn_things_off() -> None:
    argv = "--worker-urls http://a:1 --disable-retries --disable-circuit-breaker --disable-health-check"
    argv += " --disable-pair-probes --pair-probe-interval-secs 9 --pair-probe-timeout-secs 8"
    config = config_from(make_parser().parse_args(argv.split()))
    assert (config.retry.max_tries, config.breaker.enabled, config.health.enabled) == (1, False, False)
    assert config.probes == ProbeConfig(interval_s=9, timeout_s=8, enabled=False)


@pytest.mark.parametrize("argv", [["--pd-disaggregation"], ["--worker-urls"]])
def test_a_router_may_start_without_servers_if_it_is_told_which_kind_will_come(argv: list[str]) -> None:
    assert config_from(make_parser().parse_args(argv)).workers == ()


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_flags_of_sglang_router_that_are_not_honoured_are_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["--worker-urls", "http://a:1", f"--{name}", "x"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"--{name} of sglang-router is not supported: {UNSUPPORTED[name]}" in said


def test_a_flag_is_ours_or_foreign_but_not_both() -> None:
    ours = {name.removeprefix("--") for action in make_parser()._actions for name in action.option_strings}
    assert ours & set(UNSUPPORTED) == set()


def test_unknown_flags_are_still_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--worker-urls", "http://a:1", "--no-such-flag"])
    assert capsys.readouterr().err == "error: --no-such-flag: there is no such flag\n"


def test_keys_are_in_no_repr() -> None:
    argv = ["--worker-urls", "http://a:1", "--api-key", "s3cret", "--worker-api-key", "s3cret2"]
    assert "s3cret" not in repr(config_from(make_parser().parse_args(argv)))


def test_every_flag_of_sglang_router_is_known_here() -> None:
    """The list was taken from sglang-router 0.3.2."""
    listed = set((Path(__file__).parent / "sglang_router_flags.txt").read_text().split())
    ours = {name.removeprefix("--") for action in make_parser()._actions for name in action.option_strings}
    assert listed - ours - set(UNSUPPORTED) == set()
