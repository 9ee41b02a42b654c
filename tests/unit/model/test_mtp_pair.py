"""An MTP module on one or both sides of a pair: the text is the same. Draft KV, the first drafts and the hidden state
are sent between equal drafters.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

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
    """With the module on both sides the first step of decode verifies drafts, and decode drafts what it would draft had
    it computed the prompt itself. The prompt of 64 tokens ends with a page: its next slot needs the hidden state.
    """
    path, reference = mtp_model("qwen3_5_text")
    prompts = prompts_of((63, 150, 40, 64))
    expected = deep_hybrid("qwen3_5_text").reference_tokens(path, prompts, NEW_TOKENS)
    drafts: dict[LocalExecutor, dict[tuple[str, int], tuple[int, ...]]] = defaultdict(dict)
    firsts: dict[LocalExecutor, dict[str, tuple[int, ...]]] = defaultdict(dict)
    resolve = LocalExecutor.resolve

    def recorded(self: LocalExecutor, handle: StepHandle) -> StepResult:
        result = resolve(self, handle)
        for row in handle.plan.rows:
            firsts[self].setdefault(row.rid, row.drafts)
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
        found, first = drafts[pair.answering.built.executor], firsts[pair.answering.built.executor]
        assert bool(found) == (decode is NEXTN) and len(first) == len(prompts)
        assert pair.prefill is not None
        assert bool(drafts[pair.prefill.built.executor]) == (prefill is decode)
    if prefill is not decode:
        assert not any(first.values())
        return
    for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True), 1):
        assert list(first[f"r{number}"]) == reference.drafts([*prompt, tokens[0]], NUM_DRAFTS)
        for (rid, at), proposal in found.items():
            count = at + 1 - len(prompt)
            if rid == f"r{number}" and count <= NEW_TOKENS:
                assert list(proposal) == reference.drafts([*prompt, *tokens[:count]], NUM_DRAFTS), count


def test_a_module_with_other_weights_gets_no_draft_kv(mtp_model: Models, tmp_path: Path) -> None:
    """Its pair connects all the same: the target's weights are equal. The first step of decode is plain."""
    path, _ = mtp_model("qwen3_5_text")
    other = shutil.copytree(path, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["mtp.fc.weight"] += 0.1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    prompts = prompts_of((63, 40))
    expected = deep_hybrid("qwen3_5_text").reference_tokens(path, prompts, NEW_TOKENS)
    num_bytes = []
    for prefill_path in (path, other):
        with running_models(
            path, pair=True, prefill_impl="native", model_impl="native", prefill_path=prefill_path,
            prefill_speculative=NEXTN, speculative=NEXTN,
        ) as pair:  # fmt: skip
            assert [pair.generate([prompt], NEW_TOKENS)[0] for prompt in prompts] == expected
            pair.assert_idle()
            assert pair.prefill is not None
            num_bytes.append(pair.prefill.state().counters["kv_transfer_bytes"])
    assert num_bytes[1] < num_bytes[0]
