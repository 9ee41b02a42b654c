"""Many ranks: whatever either side is split into, greedy tokens are those of the single process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import assert_idle, running_pair
from tests.e2e.test_parity import ask, make_prompts, reference
from tests.tiny import Family

SPLITS = [
    (("--tp-size", "1"), ("--tp-size", "2")),
    (("--tp-size", "2"), ("--tp-size", "1")),
    (("--tp-size", "2"), ("--tp-size", "2")),
    (("--tp-size", "4"), ("--tp-size", "2")),
    (("--pp-size", "2"), ("--pp-size", "1")),
    (("--pp-size", "2"), ("--pp-size", "2")),
]
COMMON = ("--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "32")


@pytest.mark.parametrize(("prefill", "decode"), [("2", "2"), ("1", "2"), ("2", "1")])
def test_replicas_on_either_side(prefill: str, decode: str, tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = tiny_checkpoint("llama")
    prompts = make_prompts(vocab_size=320)
    expected = reference(model, prompts)
    sides = {"prefill_flags": ("--dp-size", prefill), "decode_flags": ("--dp-size", decode)}
    with running_pair(str(model), *COMMON, **sides) as pair:
        batch = [prompts[i % len(prompts)] for i in range(24)]
        for i, answer in enumerate(ask(pair.router.url, batch)):
            assert answer["output_ids"] == expected[i % len(prompts)], f"{len(batch[i])} tokens"
        for server, size in ((pair.prefill, prefill), (pair.decode, decode)):
            served = [state["counters"]["requests"] for state in server.state()["internal_states"]]
            assert len(served) == int(size) and sum(served) == len(batch) and all(served), served
        assert_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize(("prefill", "decode"), SPLITS, ids=lambda flags: "".join(flags))
def test_split_models(
    prefill: tuple[str, ...], decode: tuple[str, ...], tiny_checkpoint: Callable[[Family], Path]
) -> None:
    model = tiny_checkpoint("llama")
    prompts = make_prompts(vocab_size=320)
    expected = reference(model, prompts)
    with running_pair(str(model), *COMMON, prefill_flags=prefill, decode_flags=decode) as pair:
        batch = [prompts[i % len(prompts)] for i in range(12)]
        for i, answer in enumerate(ask(pair.router.url, batch)):
            assert answer["output_ids"] == expected[i % len(prompts)], f"{len(batch[i])} tokens"
        assert_idle(pair.prefill, pair.decode)
