"""Policies are pure choices; configuration refuses what cannot work."""

from __future__ import annotations

import random

import pytest

from pdserve.errors import ConfigError
from pdserve.launch_router import config_from, make_parser
from pdserve.router.config import Role, RouterConfig, WorkerSpec, parse_worker_url, prefill_spec
from pdserve.router.policies import choose_least_loaded, choose_random


def test_random_reaches_every_candidate() -> None:
    rng = random.Random(7)
    assert {choose_random([9, 0, 5], rng) for _ in range(100)} == {0, 1, 2}


def test_least_loaded_takes_the_least_and_breaks_ties_at_random() -> None:
    rng = random.Random(7)
    assert choose_least_loaded([3, 1, 2], rng) == 1
    assert {choose_least_loaded([2, 0, 0, 1], rng) for _ in range(100)} == {1, 2}


@pytest.mark.parametrize(
    ("values", "port", "ask"),
    [(["http://h:1"], None, True), (["http://h:1", "none"], None, False), (["http://h:1/", "8998"], 8998, False)],
)
def test_prefill_takes_an_optional_port(values: list[str], port: int | None, ask: bool) -> None:
    assert prefill_spec(values) == WorkerSpec(
        role=Role.PREFILL, url="http://h:1", bootstrap_port=port, ask_bootstrap_port=ask
    )


@pytest.mark.parametrize("values", [["http://h:1", "0"], ["http://h:1", "x"], ["http://h:1", "70000"], ["a", "1", "2"]])
def test_bad_prefill_values_are_refused(values: list[str]) -> None:
    with pytest.raises(ConfigError):
        prefill_spec(values)


@pytest.mark.parametrize("text", ["", "h:1", "ftp://h", "http://", "http://h:x", "http://h:1/v1", "http://h:99999"])
def test_what_is_no_base_url_is_refused_by_flag_name(text: str) -> None:
    with pytest.raises(ConfigError, match="decode"):
        parse_worker_url(text, field="decode")


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
    assert (config.policy, config.request_timeout_s) == ("least_loaded", 9.0)
