"""1P+1D over shared memory, asked for or found by `auto`: greedy tokens are those of `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import assert_idle, running_pair
from tests.reference import load_reference, reference_greedy
from tests.tiny import Family

BACKEND = "--disaggregation-transfer-backend"
PROMPTS = [[5, 6, 7] * n for n in (1, 11, 100)]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize("backend", [pytest.param("shm", marks=pytest.mark.slow), "auto"])
def test_tokens_are_those_of_transformers(backend: str, tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = tiny_checkpoint("llama")
    loaded = load_reference(model)
    expected = [reference_greedy(loaded, prompt, 6) for prompt in PROMPTS]
    with running_pair(str(model), "--dtype", "float32", "--max-total-tokens", "8192", BACKEND, backend) as pair:
        found = [pair.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] for prompt in PROMPTS]
        assert found == expected
        assert pair.prefill.state()["counters"]["kv_transfer_bytes"] > 0
        assert f"'transfer_backend': '{backend}'" in str(pair.prefill.state())
        assert_idle(pair.prefill, pair.decode)
