"""Qwen3-Next, Qwen3.5 and Kimi Linear in native code and real processes: a pair over Mooncake and NIXL gives
transformers' tokens, whatever either side is split into, also when clients leave and memory is short.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.transfer.transports.nixl_engine import is_installed
from tests.e2e.harness import assert_idle, generate_batch, running_pair, until
from tests.e2e.test_model_families import bodies_of, check_split, tokens_of
from tests.model_families import KIMI, LENGTHS, deep_hybrid, prompts_of

NEW_TOKENS = 12
COMMON = ("--dtype", "float32", "--chunked-prefill-size", "96", "--model-impl", "native", "--cpu-kernels", "torch")
SPLITS = {
    "qwen3_next, tp 1 to 2": ("qwen3_next", "--tp-size 1", "--tp-size 2"),
    "qwen3_5_text, tp 2 to 1": ("qwen3_5_text", "--tp-size 2", "--tp-size 1"),
    "qwen3_5, tp 2 to 4": ("qwen3_5", "--tp-size 2", "--tp-size 4"),
    "qwen3_5_moe_text, tp 4 to 2": ("qwen3_5_moe_text", "--tp-size 4", "--tp-size 2"),
    "qwen3_5_moe, pp 2 to 1": ("qwen3_5_moe", "--pp-size 2", "--pp-size 1"),
    "kimi_linear, tp 2 to 1": (KIMI, "--tp-size 2", "--tp-size 1"),
    "kimi_linear, tp 1 to 2": (KIMI, "--tp-size 1", "--tp-size 2"),
}
MOVING = "--tp-size 2 --ep-size 2 --ep-num-redundant-experts 2 --enable-eplb --eplb-rebalance-num-iterations 3"


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_split_models(split: str, hybrid_checkpoint: Callable[[str], Path]) -> None:
    name, prefill, decode = SPLITS[split]
    check_split(deep_hybrid(name), hybrid_checkpoint(name), prefill, decode, *COMMON)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="nixl is not installed; scripts/setup.sh says how")
@pytest.mark.parametrize("split", [split for split in SPLITS if "2 to" in split])
def test_split_models_over_nixl(split: str, hybrid_checkpoint: Callable[[str], Path]) -> None:
    name, prefill, decode = SPLITS[split]
    backend = ("--disaggregation-transfer-backend", "nixl")
    check_split(deep_hybrid(name), hybrid_checkpoint(name), prefill, decode, *COMMON, *backend)


@pytest.mark.slow
def test_experts_move_while_requests_run(hybrid_checkpoint: Callable[[str], Path]) -> None:
    """On decode, every third step, with copies of experts; prefill has a part of every expert."""
    name = "qwen3_next"
    prompts = prompts_of(LENGTHS)
    expected = deep_hybrid(name).reference_tokens(hybrid_checkpoint(name), prompts, NEW_TOKENS)
    with running_pair(str(hybrid_checkpoint(name)), *COMMON, decode_flags=MOVING.split()) as pair:

        def have_moved() -> bool:
            """A thread plans while steps go on, so the number of requests that this takes varies."""
            assert tokens_of(generate_batch(pair.url, bodies_of(prompts, NEW_TOKENS))) == expected
            facts = pair.decode.state()["internal_states"][0]["facts"]
            return facts["expert_rebalances"] > 1 and facts["experts_moved"] > 0

        until(have_moved, 60.0, "experts have moved twice")
        assert_idle(*pair.workers)
