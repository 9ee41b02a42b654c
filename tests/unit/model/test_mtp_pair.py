"""An MTP module on one or both sides of a pair: the text is the same; draft KV is sent between equal drafters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.executor.interface import StepHandle, StepResult
from pdserve.executor.local_executor import LocalExecutor
from tests.model_families import deep_hybrid, prompts_of
from tests.model_pair import PLAIN, running_models
from tests.mtp import MTPReference

NEW_TOKENS, NUM_DRAFTS = 8, 2
NEXTN = SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=NUM_DRAFTS, speculative_adaptive=False)
Models = Callable[[str], tuple[Path, MTPReference]]


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize(
    ("prefill", "decode"), [(NEXTN, NEXTN), (PLAIN, NEXTN), (NEXTN, PLAIN)], ids=["both", "decode", "prefill"]
)
def test_a_pair_gives_transformers_tokens(
    prefill: SpeculativeConfig,
    decode: SpeculativeConfig,
    layerwise: bool,
    mtp_model: Models,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the module on both sides decode drafts at once what it would draft had it computed the prompt itself."""
    path, reference = mtp_model("qwen3_5_text")
    prompts = prompts_of((63, 150, 40))
    expected = deep_hybrid("qwen3_5_text").reference_tokens(path, prompts, NEW_TOKENS)
    drafts: dict[LocalExecutor, dict[tuple[str, int], tuple[int, ...]]] = defaultdict(dict)
    resolve = LocalExecutor.resolve

    def recorded(self: LocalExecutor, handle: StepHandle) -> StepResult:
        result = resolve(self, handle)
        for index, found in result.drafts.items():
            row = handle.plan.rows[index]
            drafts[self][row.rid, row.start + len(result.sampled(index))] = found
        return result

    monkeypatch.setattr(LocalExecutor, "resolve", recorded)
    with running_models(
        path, pair=True, prefill_impl="native", model_impl="native", layerwise=layerwise, chunk=50,
        prefill_speculative=prefill, speculative=decode,
    ) as pair:  # fmt: skip
        assert [pair.generate([prompt], NEW_TOKENS)[0] for prompt in prompts] == expected
        pair.assert_idle()
        found = drafts[pair.answering.built.executor]
        assert bool(found) == (decode is NEXTN)
    if prefill is decode:
        for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True), 1):
            for count in range(2, NEW_TOKENS + 1):
                known = [*prompt, *tokens[:count]]
                assert list(found[f"r{number}", len(known) - 1]) == reference.drafts(known, NUM_DRAFTS), count
