"""Policies are pure choices; configuration refuses what cannot work."""

from __future__ import annotations

import dataclasses
import random

import pytest

from pdserve.errors import ConfigError
from pdserve.launch_router import config_from, make_parser
from pdserve.router.config import Role, RouterConfig, WorkerSpec, parse_worker_url, prefill_spec
from pdserve.router.conversation import ConversationKey
from pdserve.router.policies import Candidate, choose_by_conversation, choose_least_loaded, choose_random

KEYS = [ConversationKey(f"conversation {i}".encode(), named=True) for i in range(2000)]


def loaded(*loads: int) -> list[Candidate]:
    return [Candidate(f"http://worker-{index}:30000", load) for index, load in enumerate(loads)]


def urls_of(keys: list[ConversationKey], candidates: list[Candidate]) -> list[str]:
    """Where each conversation goes."""
    rng = random.Random(7)
    return [candidates[choose_by_conversation(candidates, key, rng)].url for key in keys]


def test_random_reaches_every_candidate() -> None:
    rng = random.Random(7)
    assert {choose_random(loaded(9, 0, 5), None, rng) for _ in range(100)} == {0, 1, 2}


def test_least_loaded_takes_the_least_and_breaks_ties_at_random() -> None:
    rng = random.Random(7)
    assert choose_least_loaded(loaded(3, 1, 2), None, rng) == 1
    assert {choose_least_loaded(loaded(2, 0, 0, 1), None, rng) for _ in range(100)} == {1, 2}


def test_a_conversation_stays_whatever_the_load_and_the_order_of_the_workers() -> None:
    before = urls_of(KEYS, loaded(0, 0, 0, 0))
    assert urls_of(KEYS, loaded(900, 0, 50, 3)) == before
    assert urls_of(KEYS, loaded(0, 0, 0, 0)[::-1]) == before


def test_conversations_are_spread_evenly() -> None:
    homes = urls_of(KEYS, loaded(0, 0, 0, 0))
    counts = [homes.count(candidate.url) for candidate in loaded(0, 0, 0, 0)]
    assert all(400 < count < 600 for count in counts), counts


def test_a_worker_that_goes_moves_its_own_conversations_only_and_gets_them_back() -> None:
    workers = loaded(0, 0, 0, 0)
    before = urls_of(KEYS, workers)
    gone = workers[2]
    after = urls_of(KEYS, [worker for worker in workers if worker is not gone])
    moved = [new for old, new in zip(before, after, strict=True) if old == gone.url]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != gone.url)
    assert {worker.url for worker in workers if worker is not gone} == set(moved), "they go to all others"
    assert urls_of(KEYS, workers) == before


def test_a_worker_that_comes_takes_its_share_and_moves_nothing_else() -> None:
    before, after = urls_of(KEYS, loaded(0, 0, 0)), urls_of(KEYS, loaded(0, 0, 0, 0))
    newest = loaded(0, 0, 0, 0)[3].url
    changed = {new for old, new in zip(before, after, strict=True) if old != new}
    assert changed == {newest}
    assert 400 < after.count(newest) < 600


def test_an_opening_alone_does_not_pile_up_on_one_worker() -> None:
    rng = random.Random(7)
    opening = ConversationKey(b"the same system prompt", named=False)
    home = choose_by_conversation(loaded(0, 0, 0), opening, rng)
    few = loaded(*(8 if index == home else 0 for index in range(3)))
    assert choose_by_conversation(few, opening, rng) == home
    many = loaded(*(9 if index == home else 0 for index in range(3)))
    second = choose_by_conversation(many, opening, rng)
    assert second != home
    assert choose_by_conversation(many, dataclasses.replace(opening, named=True), rng) == home
    assert choose_by_conversation(loaded(50, 50, 50), opening, rng) == home, "all are as busy"
    assert choose_by_conversation(loaded(500), opening, rng) == 0


def test_without_a_conversation_the_least_loaded_is_taken() -> None:
    assert choose_by_conversation(loaded(3, 1, 2), None, random.Random(7)) == 1


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
