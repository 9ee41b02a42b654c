"""Servers that change their role in place: no weights are loaded, the prefix cache stays, and the tokens are equal."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import Server, assert_idle, ranks_of, running, start_server
from tests.tiny import Family

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


DIRECTIONS = list(itertools.permutations(("null", "prefill", "decode"), 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", ()),
        ("llama", ("--disaggregation-transfer-backend", "shm")),
        ("llama", ("--disaggregation-transfer-backend", "nixl")),
        ("llama", ("--tp-size", "2")),
        ("llama", ("--dp-size", "2")),
        ("llama", ("--pp-size", "2")),
        ("qwen3_next", ()),
        ("gemma3", ()),
        ("llama", ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")),
        ("llama", ("--kv-cache-dtype", "fp8_e4m3")),
    ],
)
def test_all_directions(tiny_checkpoint: Callable[[Family], Path], family: Family, flags: tuple[str, ...]) -> None:
    model = str(tiny_checkpoint(family))
    with cluster(model, ["null", "prefill", "decode"], *flags) as (made, (server, prefill, decode)):
        expected = [list(post(server, body)["output_ids"]) for body in BODIES]
        pair = [made.ask(prefill, decode, body)[0] for body in BODIES]
        role = "null"
        for new in ("prefill", "decode", "null", "decode", "prefill", "null"):
            assert (role, new) in DIRECTIONS
            made.switch(server, new)
            role = new
            for number, body in enumerate(BODIES):
                if role == "null":
                    assert post(server, body)["output_ids"] == expected[number]
                elif role == "prefill":
                    assert made.ask(server, decode, body)[0] == pair[number]
                else:
                    assert made.ask(prefill, server, body)[0] == pair[number]
