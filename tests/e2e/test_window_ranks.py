"""Layers with a window over ranks, in real processes over Mooncake: however either side is split, the greedy
float32 tokens are transformers' own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import assert_idle, running_pair
from tests.e2e.test_parity import ask, make_prompts, reference
from tests.tiny import WINDOW_FAMILIES, Family, make_tiny

SPLITS = [
    (("--tp-size", "1"), ("--tp-size", "2")),
    (("--tp-size", "2"), ("--tp-size", "1")),
    (("--pp-size", "3"), ("--pp-size", "1")),
    (("--pp-size", "3"), ("--pp-size", "3")),
]
FLAGS = (
    "--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "16", "--chunked-prefill-size", "128",
    "--model-impl", "native", "--disaggregation-enable-kv-checksum",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("splits", SPLITS, ids=["tp 1, 2", "tp 2, 1", "pp 3, 1", "pp 3, 3"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_pair_of_unequal_splits(
    family: Family, splits: tuple[tuple[str, str], tuple[str, str]], tmp_path: Path
) -> None:
    model = make_tiny(family, tmp_path, **WINDOW_FAMILIES[family])
    prompts = make_prompts(vocab_size=320)
    expected = reference(model, prompts)
    prefill, decode = splits
    with running_pair(str(model), *FLAGS, prefill_flags=prefill, decode_flags=decode) as pair:
        assert [ask(pair.router.url, prompt)["output_ids"] for prompt in prompts] == expected
        assert [answer["output_ids"] for answer in ask(pair.router.url, prompts)] == expected, "at once"
        assert_idle(pair.prefill, pair.decode)
