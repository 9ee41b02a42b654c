"""DP attention: replicas that share their feed-forward layers give the single process's tokens, and end together."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import assert_idle, assert_refused, ranks_of, running_monolith, running_nodes, running_pair
from tests.e2e.test_parity import ask, make_prompts, reference
from tests.tiny import Family

COMMON = ("--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "32")
MOONCAKE = ("--disaggregation-transfer-backend", "mooncake")
TWO = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
TP2 = ("--tp-size", "2")
FOUR = ("--tp-size", "4", "--dp-size", "2", "--enable-dp-attention")
MOVING = ("--ep-num-redundant-experts", "2", "--enable-eplb", "--eplb-rebalance-num-iterations", "4")


def check_pair(model: Path, prefill: tuple[str, ...], decode: tuple[str, ...], *flags: str) -> dict[str, Any]:
    """A pair gives the reference's tokens: with one request at a time, so that other replicas have none, with many at
    once, and with prompts that were seen before. Returns decode's state.
    """
    prompts = make_prompts(vocab_size=320)
    expected = reference(model, prompts)
    chunks = ("--chunked-prefill-size", "96")
    with running_pair(str(model), *COMMON, *MOONCAKE, *chunks, *flags, prefill_flags=prefill, decode_flags=decode) as p:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert ask(p.router.url, prompt)["output_ids"] == tokens, f"{len(prompt)} tokens, alone"
        batch = [prompts[i % len(prompts)] for i in range(24)]
        for i, answer in enumerate(ask(p.router.url, batch)):
            assert answer["output_ids"] == expected[i % len(prompts)], f"{len(batch[i])} tokens"
        for server, side in ((p.prefill, prefill), (p.decode, decode)):
            served = [state["counters"]["requests"] for state in server.state()["internal_states"]]
            assert len(served) == (2 if "--dp-size" in side else 1) and all(served), served
        assert_idle(p.prefill, p.decode)
        return p.decode.state()


def check_moved(state: dict[str, Any]) -> None:
    facts = state["internal_states"][0]["facts"]
    assert facts["expert_rebalances"] > 1 and facts["experts_moved"] > 0


def test_two_replicas_on_each_side(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """Experts split by column on one side; whole ones, which move, with overlap on the other."""
    decode = (*TWO, "--ep-size", "2", *MOVING, "--no-disable-overlap-schedule")
    check_moved(check_pair(tiny_checkpoint("qwen3_moe"), TWO, decode))


@pytest.mark.slow
def test_experts_of_four_ranks_beside_a_server_that_is_not_split(tiny_checkpoint: Callable[[Family], Path]) -> None:
    check_moved(check_pair(tiny_checkpoint("qwen3_moe"), (), (*FOUR, "--ep-size", "4", *MOVING)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (TWO, TWO),
        (FOUR, FOUR),
        (FOUR, ("--tp-size", "2")),
        (("--tp-size", "2"), FOUR),
        (TWO, FOUR),
        (("--dp-size", "2"), TWO),
    ],
    ids="".join,
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_other_splits(
    prefill: tuple[str, ...], decode: tuple[str, ...], family: Family, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    check_pair(tiny_checkpoint(family), prefill, decode)


@pytest.mark.slow
def test_deterministic_mode(tiny_checkpoint: Callable[[Family], Path]) -> None:
    check_pair(tiny_checkpoint("llama"), FOUR, FOUR, "--enable-deterministic-inference")


@pytest.mark.slow
def test_replicas_whose_ranks_are_spread_over_two_nodes(tiny_checkpoint: Callable[[Family], Path]) -> None:
    model, prompts = tiny_checkpoint("llama"), make_prompts(vocab_size=320)
    with running_nodes(str(model), "of-these-nodes", *COMMON, *FOUR) as nodes:
        for answer, tokens in zip(ask(nodes.first.url, prompts), reference(model, prompts), strict=True):
            assert answer["output_ids"] == tokens


@pytest.mark.slow
def test_a_lost_rank_of_one_replica_ends_the_server_for_the_clients_of_the_other(
    tiny_checkpoint: Callable[[Family], Path],
) -> None:
    with running_monolith(str(tiny_checkpoint("llama")), *COMMON, *TWO) as server:
        ranks = ranks_of(server)
        assert len(ranks) == 2
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}, "stream": True}
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=100) as stream:
            lines = stream.iter_lines()
            next(lines)
            idle = [state["num_running_reqs"] == 0 for state in server.state()["internal_states"]].index(True)
            os.kill(ranks[idle].pid, signal.SIGKILL)
            said = b"".join(lines)
        assert b'"error"' in said, said[-500:]
        assert server.child.wait_exit(60.0), "it hangs"
        assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        pytest.param(("--tp-size", "4", "--dp-size", "3", "--enable-dp-attention"), "dp_size", marks=pytest.mark.slow),
        (("--tp-size", "10", "--dp-size", "5", "--enable-dp-attention"), "tp_size"),
    ],
)
def test_what_cannot_be_is_refused_at_start(
    flags: tuple[str, ...], field: str, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    assert_refused(str(tiny_checkpoint("llama")), (*COMMON, *flags), field)
