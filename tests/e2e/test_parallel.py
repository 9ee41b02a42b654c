"""Many ranks: whatever either side is split into, greedy tokens are those of the single process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from pdserve.transfer.transports.nixl_engine import is_installed
from tests.e2e.harness import (
    Pair,
    Server,
    assert_idle,
    assert_refused,
    ranks_of,
    running_monolith,
    running_nodes,
    running_pair,
    until,
)
from tests.e2e.test_parity import ask, make_prompts, reference
from tests.reference import load_reference, reference_greedy
from tests.share import rest_slow
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


def served(server: Server) -> list[int]:
    """How many requests each replica has had."""
    return [int(state["counters"].get("requests", 0)) for state in server.state()["internal_states"]]


def more(now: list[int], before: list[int]) -> list[int]:
    """What each replica has had since."""
    return [many - few for many, few in zip(now, before, strict=True)]


@pytest.fixture(scope="module")
def doubled(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Pair]:
    """Two replicas on either side."""
    sizes = ("--dp-size", "2", "--max-total-tokens", "16384")
    with running_pair(str(tiny_checkpoint("llama")), "--dtype", "float32", *sizes) as pair:
        yield pair


def check_replicas(pair: Pair, model: Path, prefill: int, decode: int) -> None:
    """The reference's tokens, and every replica has its share."""
    prompts = make_prompts(vocab_size=320)
    expected = reference(model, prompts)
    before = [served(server) for server in pair.workers]
    batch = [prompts[i % len(prompts)] for i in range(24)]
    for i, answer in enumerate(ask(pair.router.url, batch)):
        assert answer["output_ids"] == expected[i % len(prompts)], f"{len(batch[i])} tokens"
    for server, size, counts in zip(pair.workers, (prefill, decode), before, strict=True):
        shares = more(served(server), counts)
        assert len(shares) == size and sum(shares) == len(batch) and all(shares), shares
    assert_idle(*pair.workers)


def test_replicas_on_both_sides(doubled: Pair, tiny_checkpoint: Callable[[Family], Path]) -> None:
    check_replicas(doubled, tiny_checkpoint("llama"), 2, 2)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="nixl is not installed; scripts/setup.sh says how")
def test_replicas_on_both_sides_over_nixl(tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = tiny_checkpoint("llama")
    flags = ("--dp-size", "2", "--max-total-tokens", "16384", "--disaggregation-transfer-backend", "nixl")
    with running_pair(str(model), "--dtype", "float32", *flags) as pair:
        check_replicas(pair, model, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_replicas_on_one_side(prefill: int, decode: int, tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = tiny_checkpoint("llama")
    sides = {"prefill_flags": ("--dp-size", str(prefill)), "decode_flags": ("--dp-size", str(decode))}
    with running_pair(str(model), *COMMON, **sides) as pair:
        check_replicas(pair, model, prefill, decode)


def test_rooms_that_all_name_one_replica_are_shared_out(
    doubled: Pair, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    prompts = [[3 + (7 * index + number) % 300 for index in range(900)] for number in range(12)]
    loaded = load_reference(tiny_checkpoint("llama"))
    expected = [reference_greedy(loaded, prompt, 4) for prompt in prompts]
    before = [served(server) for server in doubled.workers]
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "bootstrap_host": ["127.0.0.1"] * len(prompts),
        "bootstrap_port": [doubled.prefill.bootstrap_port] * len(prompts),
        "bootstrap_room": [2 * number for number in range(len(prompts))],
    }
    with ThreadPoolExecutor() as pool:
        halves = [
            pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=200) for server in doubled.workers
        ]
    answers = [half.result() for half in halves]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    assert [answer["output_ids"] for answer in answers[1].json()] == expected
    for server, counts in zip(doubled.workers, before, strict=True):
        shares = more(served(server), counts)
        assert sum(shares) == len(prompts) and min(shares) > 0, (server.child.name, shares)
    assert_idle(*doubled.workers)


def check_split(model: Path, prefill: tuple[str, ...], decode: tuple[str, ...], *flags: str) -> None:
    """A pair that is split so gives the reference's tokens, and lets go of everything."""
    prompts = make_prompts(vocab_size=320)
    expected = reference(model, prompts)
    with running_pair(str(model), *COMMON, *flags, prefill_flags=prefill, decode_flags=decode) as pair:
        batch = [prompts[i % len(prompts)] for i in range(12)]
        for i, answer in enumerate(ask(pair.router.url, batch)):
            assert answer["output_ids"] == expected[i % len(prompts)], f"{len(batch[i])} tokens"
        assert_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [pytest.param(*split, marks=[] if number == 5 else pytest.mark.slow) for number, split in enumerate(SPLITS)],
    ids="".join,
)
def test_split_models(
    prefill: tuple[str, ...], decode: tuple[str, ...], tiny_checkpoint: Callable[[Family], Path]
) -> None:
    check_split(tiny_checkpoint("llama"), prefill, decode, "--disaggregation-transfer-backend", "mooncake")


@pytest.mark.skipif(not is_installed(), reason="nixl is not installed; scripts/setup.sh says how")
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [pytest.param(*split, marks=[] if number == 3 else pytest.mark.slow) for number, split in enumerate(SPLITS)],
    ids="".join,
)
@pytest.mark.slow
def test_split_models_over_nixl(
    prefill: tuple[str, ...], decode: tuple[str, ...], tiny_checkpoint: Callable[[Family], Path]
) -> None:
    check_split(tiny_checkpoint("llama"), prefill, decode, "--disaggregation-transfer-backend", "nixl")


@pytest.mark.parametrize("number", rest_slow([signal.SIGKILL, signal.SIGSTOP]), ids=["killed", "stopped"])
def test_a_lost_rank_ends_the_server_with_a_clear_error(
    number: signal.Signals, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    with running_monolith(str(tiny_checkpoint("llama")), *COMMON, "--tp-size", "2") as server:
        leader, follower = ranks_of(server)
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}, "stream": True}
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=100) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(follower.pid, number)
            said = b"".join(lines)
        assert b'"error"' in said, said[-500:]
        assert server.child.wait_exit(60.0), "it hangs"
        if number is signal.SIGSTOP:  # a death is seen by the launcher first
            assert any("rank 1 (tp 1, pp 0)" in line and "is silent" in line for line in server.lines), server.lines
        assert not leader.is_running() and not follower.is_running()


def test_two_nodes(tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = tiny_checkpoint("llama")
    prompts = make_prompts(vocab_size=320)
    with running_nodes(str(model), "of-these-nodes", *COMMON, "--tp-size", "2", "--pp-size", "2") as nodes:
        assert [len(ranks_of(node)) for node in (nodes.first, nodes.second)] == [2, 2]
        for prompt, tokens in zip(prompts, reference(model, prompts), strict=True):
            assert ask(nodes.first.url, prompt)["output_ids"] == tokens


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--tp-size", "3"), "tp_size"),
        (("--pp-size", "4"), "pp_size"),
        (("--tp-size", "2", "--nnodes", "3"), "nnodes"),
        (("--nnodes", "2", "--tp-size", "2"), "dist_init_addr"),
        (("--ep-size", "2", "--tp-size", "2"), "ep_size"),
    ],
)
def test_a_split_that_cannot_be_is_refused_at_start(
    flags: tuple[str, ...], field: str, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    assert_refused(str(tiny_checkpoint("llama")), (*COMMON, *flags), field)


@pytest.mark.slow
def test_experts_on_ranks_of_their_own_on_one_side(tiny_checkpoint: Callable[[Family], Path]) -> None:
    check_split(tiny_checkpoint("qwen3_moe"), ("--tp-size", "2", "--ep-size", "2"), ("--tp-size", "1"))


@pytest.mark.slow
def test_experts_that_move_while_requests_run(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """On decode, every third step, with copies, while the next step is launched before the last one is done."""
    model = tiny_checkpoint("qwen3_moe")
    prompts = make_prompts(vocab_size=320)
    expected = reference(model, prompts)
    flags = "--tp-size 2 --ep-size 2 --ep-num-redundant-experts 2 --enable-eplb --eplb-rebalance-num-iterations 3"
    decode = (*flags.split(), "--no-disable-overlap-schedule")
    with running_pair(str(model), *COMMON, decode_flags=decode) as pair:

        def have_moved() -> bool:
            """A thread plans while steps go on, so how many requests it takes is the machine's to say."""
            for prompt, answer in zip(prompts * 2, ask(pair.router.url, prompts * 2), strict=True):
                assert answer["output_ids"] == expected[prompts.index(prompt)], f"{len(prompt)} tokens"
            facts = pair.decode.state()["internal_states"][0]["facts"]
            assert 0 < facts["expert_balancedness"] <= 1
            return facts["expert_rebalances"] > 1 and facts["experts_moved"] > 0

        until(have_moved, 60.0, "experts have moved twice")
        assert_idle(pair.prefill, pair.decode)
