"""Servers with an MTP module give the text of those without: retractions, prefix hits and aborts included.

The layers' outputs are so small that most drafts are right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.config.speculative_group import SpeculativeConfig
from tests.model_families import deep_hybrid, prompts_of
from tests.model_pair import ModelPair, running_models
from tests.mtp import write_with_mtp
from tests.share import rest_slow

NUM_NEW, LONG, NUM_LONG, FEW_TOKENS = 10, 60, 80, 320
AGREES = 0.01
NEXTN = SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=3, speculative_adaptive=False)


def num_accepted(server: ModelPair) -> int:
    """Drafts that the server which generates text has accepted."""
    return int(server.answering.state().counters["spec_accepted_tokens"])


@pytest.mark.parametrize(
    ("name", "offload", "pair"),
    rest_slow(
        [
            (name, offload, pair)
            for pair in (True, False)
            for name, offload in (("qwen3_5_text", True), ("qwen3_next", False), ("qwen3_5_moe", True))
        ],
        keep=1,
    ),
)
def test_the_text_is_that_without_a_drafter(name: str, offload: bool, pair: bool, tmp_path: Path) -> None:
    path, family = write_with_mtp(name, tmp_path / "model", agrees=AGREES), deep_hybrid(name)
    prompts, load = prompts_of((1, 63, 64, 65, 150)), prompts_of((63, 64, 65, 40), seed=1)
    expected = family.reference_tokens(path, prompts, NUM_NEW)
    long = family.reference_tokens(path, load, LONG)
    turns = [[*prompt, *tokens, 5, 6, 7] for prompt, tokens in zip(load, long, strict=True)]
    later = family.reference_tokens(path, turns, NUM_NEW)
    with running_models(
        path, pair=pair, prefill_impl="native", model_impl="native", max_total_tokens=FEW_TOKENS, offload=offload,
        speculative=NEXTN, prefill_speculative=NEXTN,
    ) as server:  # fmt: skip
        assert [server.generate([prompt], NUM_NEW)[0] for prompt in prompts] == expected
        assert num_accepted(server) > NUM_NEW
        assert server.generate(prompts, NUM_NEW) == expected, "at once"
        answers = server.generate([*load, load[0]], LONG, aborted={4: 5})
        assert answers[:4] == long, "with too little memory"
        assert answers[4] == long[0][: len(answers[4])], "what came before the abort"
        assert server.answering.state().counters["requests_retracted"] > 0
        assert [server.generate([turn], NUM_NEW)[0] for turn in turns] == later, "second turns"
        assert server.generate(turns, NUM_NEW) == later, "behind prefix hits"
        server.assert_idle()


TURNS = rest_slow([("qwen3_5_text", False), ("qwen3_next", True), ("qwen3_5_moe", True)], keep=1)


@pytest.mark.parametrize(("name", "pair"), TURNS)
def test_long_answers_of_repeated_turns_from_cached_states(name: str, pair: bool, tmp_path: Path) -> None:
    """S#36537: with NEXTN and cached states of a hybrid (extra_buffer), answers of later turns loop.

    Each turn continues from the state that the cache has kept of the turn before, and its answer is long. It is
    transformers' answer, although most tokens were drafts. The same turns again give the same answers.
    """
    path, family = write_with_mtp(name, tmp_path / "model", agrees=AGREES), deep_hybrid(name)
    (turn,) = prompts_of((70,))
    with running_models(
        path, pair=pair, prefill_impl="native", model_impl="native", speculative=NEXTN, prefill_speculative=NEXTN
    ) as server:
        turns = []
        for number in range(3):
            (answer,) = server.generate([turn], NUM_LONG)
            assert [answer] == family.reference_tokens(path, [turn], NUM_LONG), number
            turns.append((turn, answer))
            turn = [*turn, *answer, 5, 6, 7 + number]
        for turn, answer in turns:
            assert server.generate([turn], NUM_LONG) == [answer]
        caching = server.prefill or server.answering
        assert caching.state().counters["states_copied"] >= len(turns)
        assert num_accepted(server) > len(turns) * NUM_LONG // 2
        server.assert_idle()


@pytest.mark.parametrize(("name", "pair"), TURNS)
def test_prefix_hits_of_requests_that_run_at_once(name: str, pair: bool, tmp_path: Path) -> None:
    """V#53912: the prefix cache and MTP together corrupt hybrids.

    Requests share a prefix whose state is cached while others decode with drafts. Each answer is transformers', from an
    empty cache and behind a hit, alone and at once, and after other requests have taken the same pages and slots.
    """
    path, family = write_with_mtp(name, tmp_path / "model", agrees=AGREES), deep_hybrid(name)
    (shared,) = prompts_of((130,))
    prompts = [[*shared[:at], *range(9, 9 + more)] for at, more in ((130, 1), (128, 5), (64, 3), (130, 40), (96, 17))]
    expected = family.reference_tokens(path, prompts, NUM_NEW)
    others = prompts_of((63, 64, 65, 40), seed=1)
    with running_models(
        path, pair=pair, prefill_impl="native", model_impl="native", max_total_tokens=FEW_TOKENS * 2,
        speculative=NEXTN, prefill_speculative=NEXTN,
    ) as server:  # fmt: skip
        assert [server.generate([prompt], NUM_NEW)[0] for prompt in prompts] == expected, "one by one"
        assert server.generate(prompts, NUM_NEW) == expected, "at once, behind hits"
        server.generate(others, LONG)
        assert server.generate([*prompts, *prompts], NUM_NEW) == [*expected, *expected], "after other requests"
        caching = server.prefill or server.answering
        assert caching.state().counters["cached_tokens"] > 128
        assert caching.state().counters["states_copied"] > 0
        assert num_accepted(server) > NUM_NEW
        server.assert_idle()
