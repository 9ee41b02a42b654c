"""DeepSeek models in native code and real processes: a pair over Mooncake gives transformers' tokens, whatever either
side is split into, also when clients leave and memory is short.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deepseek_mtp import write_with_next_layer
from tests.e2e.harness import assert_idle, generate_all, generate_batch, running_pair
from tests.e2e.test_model_families import bodies_of, check_split, tokens_of
from tests.model_families import FAMILIES, LENGTHS, prompts_of

NEW_TOKENS = 12
COMMON = ("--dtype", "float32", "--chunked-prefill-size", "96")
NATIVE = (*COMMON, "--model-impl", "native", "--cpu-kernels", "torch")
SPLITS = {
    "tp 1 to 2": ("deepseek_v3", "--tp-size 1", "--tp-size 2"),
    "tp 2 to 1": ("deepseek_v2", "--tp-size 2", "--tp-size 1"),
    "tp 4 to 2, index": ("deepseek_v32", "--tp-size 4", "--tp-size 2"),
    "pp 2 to 1": ("deepseek_v3", "--pp-size 2", "--pp-size 1"),
    "dp attention to 1": ("deepseek_v3", "--tp-size 2 --dp-size 2 --enable-dp-attention", "--tp-size 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_split_models(split: str, family_checkpoint: Callable[[str], Path]) -> None:
    name, prefill, decode = SPLITS[split]
    check_split(FAMILIES[name], family_checkpoint(name), prefill, decode, *NATIVE)


@pytest.mark.slow
def test_a_transformers_server_prefills_for_a_native_one(family_checkpoint: Callable[[str], Path]) -> None:
    path, prompts = family_checkpoint("deepseek_v2"), prompts_of(LENGTHS)
    expected = FAMILIES["deepseek_v2"].reference_tokens(path, prompts, NEW_TOKENS)
    sides = {"prefill_flags": ("--model-impl", "transformers"), "decode_flags": ("--model-impl", "native")}
    with running_pair(str(path), *COMMON, **sides) as pair:
        assert tokens_of(generate_batch(pair.url, bodies_of(prompts, NEW_TOKENS))) == expected
        assert_idle(*pair.workers)


@pytest.mark.slow
def test_the_mtp_module_drafts_on_split_ranks(tmp_path: Path) -> None:
    path, prompts = write_with_next_layer("deepseek_v3", tmp_path, agrees=0.02), prompts_of(LENGTHS)
    expected = FAMILIES["deepseek_v3"].reference_tokens(path, prompts, NEW_TOKENS)
    drafts = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2")
    with running_pair(str(path), *NATIVE, *drafts, decode_flags=("--tp-size", "2")) as pair:
        bodies = bodies_of(prompts, NEW_TOKENS)
        assert [tokens_of(generate_all(pair.url, [body]))[0] for body in bodies] == expected
        assert tokens_of(generate_batch(pair.url, bodies)) == expected, "at once"
        assert_idle(*pair.workers)
