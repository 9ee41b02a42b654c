"""Servers that change their role in place: no weights are loaded, the prefix cache stays, and the tokens are equal."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.adapters import write_adapter
from tests.e2e.harness import Server, assert_idle, ranks_of, running, running_nodes, start_server, until
from tests.tiny import Family, make_tiny

pytestmark = pytest.mark.timeout(300)
FLAGS = ("--max-total-tokens", "4096", "--dtype", "float32")
ROOMS = itertools.count(1001)
PROMPT = list(range(20, 120))


def body(seed: int | None = None) -> dict[str, Any]:
    """A request of 100 prompt tokens, six whole pages: greedy, or drawn with `seed`."""
    drawn = {} if seed is None else {"temperature": 0.9, "sampling_seed": seed}
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True} | drawn
    return {"input_ids": PROMPT, "sampling_params": sampling}


BODIES = [body(), body(5)]


def post(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    answer = requests.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


class Cluster:
    """Servers and the bootstrap port of each that is a prefill server."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.ports = {server: server.ready.bootstrap_port for server in servers if server.ready is not None}
        self.engines = {server: [rank.pid for rank in ranks_of(server)] for server in servers}

    def switch(self, server: Server, role: str) -> None:
        """Change the role, which must happen in place."""
        answer = requests.post(f"{server.url}/pd_role_switch", json={"new_role": role}, timeout=60)
        done = answer.json()
        assert (answer.status_code, done["success"], done["new_role"]) == (200, True, role), answer.text
        assert done["in_place"] and done["safe_to_restore"], done
        assert server.state()["disaggregation_mode"] == role
        self.ports[server] = done.get("bootstrap_port")
        assert [rank.pid for rank in ranks_of(server)] == self.engines[server], "the engine's processes stay"

    def ask(self, prefill: Server, decode: Server, body: dict[str, Any]) -> tuple[list[int], int]:
        """The tokens of a request through the pair, and the prompt tokens that prefill had cached."""
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.ports[prefill], "bootstrap_room": next(ROOMS)}
        with ThreadPoolExecutor(max_workers=2) as pool:
            first, rest = pool.map(lambda server: post(server, body | room), (prefill, decode))
        return list(rest["output_ids"]), int(first["meta_info"]["cached_tokens"])


@contextlib.contextmanager
def cluster(model: str, roles: Sequence[str], *flags: str) -> Iterator[tuple[Cluster, list[Server]]]:
    servers = [start_server(model, role, *FLAGS, *flags, name=f"{role}-{n}") for n, role in enumerate(roles)]
    with running(*servers):
        yield Cluster(servers), servers
        assert_idle(*servers, deadline_s=40.0)


def test_a_pair_exchanges_its_roles_and_keeps_its_prefixes(tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = str(tiny_checkpoint("llama"))
    with cluster(model, ["prefill", "decode"]) as (made, (one, other)):
        expected = [made.ask(one, other, body)[0] for body in BODIES]
        made.switch(other, "prefill")
        made.switch(one, "decode")
        for number, body in enumerate(BODIES):
            found, cached = made.ask(other, one, body)
            assert (found, cached) == (expected[number], 96 * number), "its cache began empty: as decode it had none"
        made.switch(one, "null")
        for number, body in enumerate(BODIES):
            answer = post(one, body)
            found, cached = answer["output_ids"], answer["meta_info"]["cached_tokens"]
            assert (found, cached) == (expected[number], 96), "what it had as prefill server is there again"


def through_all_roles(model: str, *flags: str) -> None:
    """A server takes each role from each other one, and gives the same tokens in it."""
    with cluster(model, ["null", "prefill", "decode"], *flags) as (made, (server, prefill, decode)):
        expected = [list(post(server, body)["output_ids"]) for body in BODIES]
        pair = [made.ask(prefill, decode, body)[0] for body in BODIES]
        roles = ["null", "prefill", "decode", "null", "decode", "prefill", "null"]
        assert set(itertools.pairwise(roles)) == set(itertools.permutations(("null", "prefill", "decode"), 2))
        for role in roles[1:]:
            made.switch(server, role)
            for number, body in enumerate(BODIES):
                if role == "null":
                    assert post(server, body)["output_ids"] == expected[number]
                elif role == "prefill":
                    assert made.ask(server, decode, body)[0] == pair[number]
                else:
                    assert made.ask(prefill, server, body)[0] == pair[number]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--disaggregation-transfer-backend", "shm"),
        ("--disaggregation-transfer-backend", "nixl"),
        ("--tp-size", "2"),
        ("--dp-size", "2"),
        ("--pp-size", "2"),
        ("--tp-size", "2", "--disaggregation-transfer-backend", "nixl"),
        ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
        ("--kv-cache-dtype", "fp8_e4m3"),
    ],
    ids=" ".join,
)
def test_all_directions(tiny_checkpoint: Callable[[Family], Path], flags: tuple[str, ...]) -> None:
    through_all_roles(str(tiny_checkpoint("llama")), *flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen3_5_text", ()),
        ("qwen3_5_text", ("--tp-size", "2")),
        ("gemma2", ()),
        ("deepseek_v2", ()),
        ("qwen3_moe", ("--tp-size", "2", "--ep-size", "2")),
        ("qwen3_moe", ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")),
    ],
    ids=str,
)
def test_all_directions_of_a_family(
    family_checkpoint: Callable[[str], Path], family: str, flags: tuple[str, ...]
) -> None:
    through_all_roles(str(family_checkpoint(family)), *flags)


@pytest.mark.slow
def test_all_directions_with_a_model_that_drafts(tmp_path: Path) -> None:
    """The drafter is the model itself, so that its drafts are right; it drafts in each role that generates."""
    model = str(make_tiny("qwen3", tmp_path / "model"))
    drafter = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", model)
    flags = (*drafter, "--speculative-num-steps", "3", "--no-speculative-adaptive")
    with cluster(model, ["null", "prefill"], *flags) as (made, (server, prefill)):
        expected = [list(post(server, body)["output_ids"]) for body in BODIES]
        made.switch(server, "decode")
        before = server.counter("spec_verify_steps")
        assert [made.ask(prefill, server, body)[0] for body in BODIES] == expected
        assert server.counter("spec_verify_steps") > before
        made.switch(prefill, "decode")
        made.switch(server, "prefill")
        assert [made.ask(server, prefill, body)[0] for body in BODIES] == expected


@pytest.mark.slow
def test_adapters_stay_and_more_can_be_loaded_in_the_new_role(tmp_path: Path) -> None:
    base = make_tiny("qwen3", tmp_path / "base")
    first, second = (str(write_adapter(tmp_path / name, base, seed=seed)) for seed, name in enumerate(("one", "two")))
    flags = ("--enable-lora", "--lora-paths", f"one={first}", "--tp-size", "2")
    with cluster(str(base), ["null", "prefill"], *flags) as (made, (server, prefill)):
        adapted = BODIES[0] | {"lora_path": "one"}
        expected, plain = post(server, adapted)["output_ids"], post(server, BODIES[0])["output_ids"]
        assert expected != plain
        made.switch(server, "decode")
        assert made.ask(prefill, server, adapted)[0] == expected
        for one in (server, prefill):
            answer = requests.post(
                f"{one.url}/load_lora_adapter", json={"lora_name": "two", "lora_path": second}, timeout=60
            )
            assert answer.status_code == 200, answer.text
        other = made.ask(prefill, server, BODIES[0] | {"lora_path": "two"})[0]
        made.switch(server, "null")
        assert post(server, BODIES[0] | {"lora_path": "two"})["output_ids"] == other != expected


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), ("--tp-size", "2")], ids=["one rank", "two ranks"])
def test_the_host_tier_and_the_store_stay(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path, shape: tuple[str, ...]
) -> None:
    """Six prompts of 192 cached tokens each, where the device holds 512 tokens: they come back from host memory.

    The server then reads from the store what another server has computed while it was a decode server.
    """
    model, prompts = str(tiny_checkpoint("llama")), [[number + 7 * each for number in range(200)] for each in range(8)]
    sampling = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]
    options = {"directory": str(tmp_path), "prefetch_threshold": 16}
    tier = ("--enable-hierarchical-cache", "--hicache-ratio", "8", "--page-size", "16", "--max-total-tokens", "512")
    store = ("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", json.dumps(options))
    flags = (*FLAGS[2:], *tier, *store, "--hicache-storage-prefetch-policy", "wait_complete", *shape)
    server, other = (start_server(model, "prefill", *flags, name=name) for name in ("changing", "other"))
    decode = start_server(model, "decode", *FLAGS[2:], "--page-size", "16", "--max-total-tokens", "2048", *shape)
    with running(server, other, decode):
        made = Cluster([server, other, decode])
        expected = [made.ask(server, decode, body)[0] for body in bodies[:6]]
        until(lambda: server.counter("backuped_tokens") >= 6 * 192, 20.0, "all is saved and stored")
        read = server.counter("storage_prefetch_hit_tokens")
        made.switch(server, "decode")
        for body in bodies[6:]:
            expected.append(made.ask(other, server, body)[0])
        assert [made.ask(other, server, body)[0] for body in bodies[:6]] == expected[:6]
        until(lambda: other.counter("backuped_tokens") >= 2 * 192, 20.0, "the two new prompts are stored")
        assert server.counter("storage_prefetch_hit_tokens") == read, "a decode server without a cache reads nothing"
        loaded = server.counter("load_back_tokens")
        made.switch(server, "prefill")
        answers = [made.ask(server, decode, body) for body in bodies]
        assert [tokens for tokens, _ in answers] == expected
        assert all(cached >= 192 for _, cached in answers), answers
        assert server.counter("load_back_tokens") - loaded >= 6 * 192, "the device had given them to other requests"
        assert server.counter("storage_prefetch_hit_tokens") - read == 2 * 192
        assert_idle(server, other, decode, deadline_s=40.0)


@pytest.mark.slow
def test_a_suspended_request_goes_on_behind_role_changes(tiny_checkpoint: Callable[[Family], Path]) -> None:
    long = BODIES[1] | {"sampling_params": BODIES[1]["sampling_params"] | {"max_new_tokens": 800}}
    with cluster(str(tiny_checkpoint("llama")), ["null"]) as (made, (server,)):
        expected = post(server, long)["output_ids"]
        with ThreadPoolExecutor(max_workers=1) as pool:
            cut = pool.submit(post, server, long | {"rid": "one"})

            def is_suspended() -> bool:
                return requests.post(f"{server.url}/suspend", json={"rid": "one"}, timeout=60).status_code == 200

            until(is_suspended, 30.0, "suspended")
            first = cut.result()["output_ids"]
        assert 0 < len(first) < len(expected)
        made.switch(server, "decode")
        made.switch(server, "null")
        answer = requests.post(f"{server.url}/resume", json={"rid": "one"}, timeout=60)
        assert answer.status_code == 200, answer.text
        rest = answer.json()["output_ids"]
        assert expected in (rest, first + rest)


@pytest.mark.slow
def test_a_server_on_two_hosts_takes_each_role(tiny_checkpoint: Callable[[Family], Path]) -> None:
    model, token = str(tiny_checkpoint("llama")), "of-these-hosts"
    flags = ("--page-size", "16", "--cpu-threads", "1", *FLAGS)
    pair = ("--disaggregation-mode", "decode", "--no-require-control-proof", "--port", "0", "--device", "cpu")
    with running_nodes(model, token, "--tp-size", "2", *flags) as nodes:
        argv = ["--model-path", model, *flags, *pair]
        decode = Server("decode", "pdserve.launch_server", argv, variables={"PDSERVE_CONTROL_TOKEN": token})
        with running(decode):
            made, server = Cluster([nodes.first, decode]), nodes.first
            expected = [post(server, body)["output_ids"] for body in BODIES]
            made.switch(server, "prefill")
            assert [made.ask(server, decode, body)[0] for body in BODIES] == expected
            made.switch(server, "decode")
            made.switch(server, "null")
            assert [post(server, body)["output_ids"] for body in BODIES] == expected
            assert_idle(server, decode, deadline_s=40.0)
