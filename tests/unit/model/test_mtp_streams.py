"""Servers with an MTP module give the text of those without: retractions, prefix hits and aborts included.

The layers' outputs are so small that most drafts are right: S#36537 and V#53912 are states, cached prefixes and drafts
that do not fit together.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.config.speculative_group import SpeculativeConfig
from tests.model_families import deep_hybrid, prompts_of
from tests.model_pair import ModelPair, running_models
from tests.mtp import write_with_mtp
from tests.share import rest_slow

NUM_NEW, LONG, FEW_TOKENS = 10, 60, 320
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
