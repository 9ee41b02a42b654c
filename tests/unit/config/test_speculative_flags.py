"""Flags of speculative decoding: what is accepted, what is refused and by which field, and the defaults."""

from __future__ import annotations

import pytest

from pdserve.config.cli import parse_server_args
from pdserve.config.groups import ServerConfig
from pdserve.config.resolve import Machine, fill_in, without_effect
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.errors import ConfigError

CPU = Machine(has_cuda=False, num_cores=4)


def given(*flags: str) -> ServerConfig:
    return parse_server_args(["--model-path", "m", *flags])


def filled(*flags: str) -> SpeculativeConfig:
    return fill_in(given(*flags), CPU)[0].speculative


def test_no_flag_means_no_speculation() -> None:
    config = filled()
    assert not config.is_on and config.max_drafts == 0
    assert config.speculative_num_draft_tokens is None and config.speculative_num_steps is None


@pytest.mark.parametrize(
    ("flags", "steps", "draft_tokens"),
    [
        (("NGRAM",), None, 12),
        (("NGRAM", "--speculative-num-draft-tokens", "5"), None, 5),
        (("NEXTN",), 3, 4),
        (("NEXTN", "--speculative-num-steps", "1"), 1, 2),
        (("NEXTN", "--speculative-num-draft-tokens", "6"), 5, 6),
        (("EAGLE3", "--speculative-draft-model-path", "head", "--speculative-num-steps", "5"), 5, 6),
        (("STANDALONE", "--speculative-draft-model", "small"), 3, 4),
        (("NEXTN", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4"), 3, 4),
        (("NEXTN", "--speculative-eagle-topk", "1", "--speculative-draft-model-path", "m"), 3, 4),
    ],
)
def test_steps_and_draft_tokens_follow_from_each_other(
    flags: tuple[str, ...], steps: int | None, draft_tokens: int
) -> None:
    asked, config = given("--speculative-algorithm", *flags), filled("--speculative-algorithm", *flags)
    assert (config.speculative_num_steps, config.speculative_num_draft_tokens) == (steps, draft_tokens)
    assert asked.speculative.max_drafts == config.max_drafts == draft_tokens - 1
    assert config.uses_draft_model == (flags[0] != "NGRAM")


@pytest.mark.parametrize(
    ("flags", "field", "rule"),
    [
        (("--speculative-num-steps", "3"), "speculative_num_steps", "needs --speculative-algorithm"),
        (("--speculative-num-draft-tokens", "4"), "speculative_num_draft_tokens", "needs --speculative-algorithm"),
        (("--speculative-draft-model-path", "d"), "speculative_draft_model_path", "needs --speculative-algorithm"),
        (("--speculative-ngram-capacity", "5"), "speculative_ngram_capacity", "needs --speculative-algorithm"),
        (("--speculative-eagle-topk", "4"), "speculative_eagle_topk", "trees of drafts are not supported"),
        (("--speculative-algorithm", "EAGLE"), "speculative_algorithm", "EAGLE3"),
        (("--speculative-algorithm", "MEDUSA"), "speculative_algorithm", "invalid choice"),
        (("--speculative-algorithm", "EAGLE3"), "speculative_draft_model_path", "EAGLE3 needs it"),
        (("--speculative-algorithm", "STANDALONE"), "speculative_draft_model_path", "STANDALONE needs it"),
        (("--speculative-algorithm", "NGRAM", "--speculative-draft-model-path", "d"),
         "speculative_draft_model_path", "no draft model"),
        (("--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", "d"),
         "speculative_draft_model_path", "MTP layers of --model-path"),
        (("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", " "),
         "speculative_draft_model_path", "must not be empty"),
        (("--speculative-algorithm", "NGRAM", "--speculative-num-steps", "3"), "speculative_num_steps", "in one step"),
        (("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "8"),
         "speculative_num_draft_tokens", "must be 4"),
        (("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "32"), "speculative_num_steps", "1 to 31"),
        (("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "1"),
         "speculative_num_draft_tokens", "2 to 32"),
        (("--speculative-algorithm", "NEXTN", "--speculative-ngram-capacity", "9"),
         "speculative_ngram_capacity", "not NGRAM"),
        (("--speculative-algorithm", "NGRAM", "--speculative-ngram-min-match-window-size", "13"),
         "speculative_ngram_min_match_window_size", "at most"),
        (("--speculative-algorithm", "NGRAM", "--speculative-ngram-min-match-window-size", "0"),
         "speculative_ngram_min_match_window_size", "1 to 128"),
        (("--speculative-algorithm", "NEXTN", "--pp-size", "2"), "speculative_algorithm", "must be NGRAM"),
        (("--speculative-accept-threshold-single", "0.5"), "--speculative-accept-threshold-single", "does not honour"),
        (("--speculative-algorithm", "NGRAM", "--speculative-ngram-match-type", "DFS"),
         "speculative_ngram_match_type", "invalid choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_field(flags: tuple[str, ...], field: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given(*flags)
    assert caught.value.field == field
    assert rule in str(caught.value)


def test_ngram_runs_on_pipeline_stages() -> None:
    assert given("--speculative-algorithm", "NGRAM", "--pp-size", "2").speculative.is_on


def test_flags_of_trees_change_nothing_and_say_so() -> None:
    config = given(
        "--speculative-algorithm", "NGRAM", "--speculative-ngram-min-bfs-breadth", "1",
        "--speculative-ngram-max-bfs-breadth", "10", "--speculative-ngram-match-type", "PROB",
        "--speculative-ngram-branch-length", "18",
    )  # fmt: skip
    lines = without_effect(fill_in(config, CPU)[0])
    assert sum("speculative-ngram" in line for line in lines) == 4


def test_ngram_has_no_effect_on_a_prefill_server() -> None:
    flags = ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "shm")
    for algorithm, number in (("NGRAM", 1), ("NEXTN", 0)):
        config = fill_in(given(*flags, "--speculative-algorithm", algorithm), CPU)[0]
        assert sum("speculative" in line for line in without_effect(config)) == number
