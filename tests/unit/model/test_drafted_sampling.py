"""Servers with an MTP module or an EAGLE-3 head sample what those without sample: with retractions, hits and aborts.

The CPU kernels compute, so tokens and log probabilities are compared bit by bit. `test_mtp_streams` has greedy tokens
in float32. Prompts are cut at multiples of 64 positions, which recurrent layers need for equal bits. Cached KV and
states of generated tokens have other bits than those of prompts (docs/cpu-kernels.md). So a second turn of a monolith
is compared with one behind the same cached KV. Which states are cached may differ, so there turns of models with
recurrent layers have no answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import TokenLogprob
from pdserve.protocol.sampling import CoreSamplingParams
from tests.model_families import prompts_of
from tests.model_pair import ModelPair, running_models
from tests.mtp import write_with_mtp
from tests.share import rest_slow
from tests.tiny import EOS_ID, Family, make_tiny
from tests.unit.model.eagle_kit import make_eagle3
from tests.unit.model.native_kit import needs_kernels

NUM_NEW, FEW_TOKENS = 60, 320
AGREES = 0.01
"""Share of the layers' outputs: so small that most drafts of greedy requests are right."""
TWO = {"top_k": 2}
"""Draws among the two likeliest tokens, so that about half of the drafts are right."""
FEW = {70: 14.0, 71: 14.0, 72: 14.0}
"""A bias with which nearly all draws are of three tokens, which are most of the tokens of the EAGLE-3 heads."""
HEAD_TOKENS = (70, 71, 72, 75)
WANTED = Logprobs(top=3, token_ids=(70, 71))
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"seed": 1},
    "drawn among two": {"seed": 2, **TWO},
    "drawn with penalties": {
        "seed": 3, "frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.2, **TWO,
    },
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "nucleus with penalties": {"seed": 4, "top_p": 0.6, "presence_penalty": 0.8, "logit_bias": FEW},
    "EOS banned at first": {
        "seed": 5, "logit_bias": {**FEW, EOS_ID: 13.0}, "min_new_tokens": 13, "ignore_eos": False,
    },
    "stop token": {"seed": 6, "logit_bias": {**FEW, 75: 11.5}, "stop_token_ids": (75,), "min_new_tokens": 9},
}  # fmt: skip
CASES = [
    (name, pair, offload)
    for offload in (False, True)
    for pair in (True, False)
    for name in ("qwen3_5_text", "llama", "qwen3_next", "qwen3")
]

Sampled = tuple[list[int], list[TokenLogprob]]


def samplings() -> list[CoreSamplingParams]:
    usual: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
    return [CoreSamplingParams(**(usual | own)) for own in SAMPLINGS.values()]


def drafting(name: str, directory: Path) -> tuple[Path, SpeculativeConfig]:
    """Write a checkpoint of a hybrid family with an MTP module, or of another one with a head, which drafts
    `HEAD_TOKENS`.
    """
    path = directory / "model"
    if name.startswith("qwen3_"):
        sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 16, "eos_token_id": EOS_ID}
        write_with_mtp(name, path, agrees=AGREES, **sizes)
        return path, SpeculativeConfig(
            speculative_algorithm="NEXTN", speculative_num_steps=3, speculative_adaptive=False
        )
    make_tiny(cast(Family, name), path, num_hidden_layers=6)
    head = make_eagle3(directory / "head", path, draft_vocab_size=len(HEAD_TOKENS))
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"] = torch.tensor(HEAD_TOKENS) - torch.arange(len(HEAD_TOKENS))
    save_file(tensors, head / "model.safetensors")
    return path, SpeculativeConfig(
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(head), speculative_num_steps=3,
        speculative_adaptive=False,
    )  # fmt: skip


def num_accepted(server: ModelPair) -> int:
    """Drafts that the server which generates text has accepted."""
    return int(server.answering.state().counters["spec_accepted_tokens"])


@needs_kernels
@pytest.mark.parametrize(("name", "pair", "offload"), rest_slow(CASES, keep=2))
def test_draws_and_penalties_are_those_without_a_drafter(name: str, pair: bool, offload: bool, tmp_path: Path) -> None:
    path, drafter = drafting(name, tmp_path)
    prompts = prompts_of((1, 63, 64, 65, 40, 70, 128, 20))
    native: dict[str, Any] = {"prefill_impl": "native", "model_impl": "native", "dtype": "bfloat16", "chunk": 128}
    with running_models(path, pair=False, **native) as plain:
        expected = plain.sample(prompts, samplings(), WANTED)
    keeps = pair or drafter.speculative_algorithm == "EAGLE3"
    answers = [tokens if keeps else [] for tokens, _ in expected]  # see the module's docstring
    later: list[Sampled] = []
    turns = [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(prompts, answers, strict=True)]
    with running_models(path, pair=False, **native) as plain:
        for prompt, turn, sampling in zip(prompts, turns, samplings(), strict=True):
            if not pair:
                plain.sample([prompt], [sampling])  # its generated tokens are cached, as in the server below
            later += plain.sample([turn], [sampling], WANTED)
    with running_models(
        path, pair=pair, max_total_tokens=FEW_TOKENS, offload=offload, speculative=drafter, prefill_speculative=drafter,
        **native,
    ) as server:  # fmt: skip
        leaving = CoreSamplingParams(temperature=1.0, seed=9, max_new_tokens=100, ignore_eos=True)
        *answers, left = server.sample([*prompts, prompts[0]], [*samplings(), leaving], WANTED, aborted={8: 5})
        assert dict(zip(SAMPLINGS, answers, strict=True)) == dict(zip(SAMPLINGS, expected, strict=True))
        assert len(left[0]) < 100, "it was aborted"
        counters = server.answering.state().counters
        assert counters["requests_retracted"] > 0 and counters["requests_aborted"] == 1
        for number, sampling in enumerate(samplings()):
            assert server.sample([prompts[number]], [sampling], WANTED) == [expected[number]], "alone"
            assert server.sample([turns[number]], [sampling], WANTED) == [later[number]], "behind a prefix hit"
        caching = server.prefill or server.answering
        assert caching.state().counters["cached_tokens"] > 64
        assert num_accepted(server) > NUM_NEW // 2
        server.assert_idle()
