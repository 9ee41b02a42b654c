"""Mutated snapshots against `/restore` of a server over a scripted scheduler.

Every snapshot has a right length and checksum, so that the server reads its fields. Whatever they say, the answer is no
500, and names the field or is the answer of a request.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import struct
from collections import Counter
from typing import Any

import msgspec

from pdserve.http.access import SNAPSHOT_TYPE
from pdserve.protocol.snapshot import MAGIC, SNAPSHOT_VERSION
from tests.fuzz.structs import change_bytes, change_tree
from tests.unit.server.server_kit import Bench, bench, tiny_tokenizer
from tests.waiting import until

SEEDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", {"text": "hello", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "regex": "[a-z]*", "logprobs": True}),
    ("/v1/completions", {"prompt": "a", "stream": True, "stop": ["zz"], "logit_bias": {"5": 1.5}}),
    ("/v1/responses", {"input": "hello"}),
)
HEAD = 56
"""Bytes before the head of a snapshot."""


async def run(count: int, seed: int) -> Counter[int]:
    """Post `count` snapshots; returns how often each status came. Raises AssertionError for a 500."""
    rng, statuses = random.Random(seed), Counter[int]()
    async with bench(tiny_tokenizer()) as b:
        trees = [await _tree(b, path, body) for path, body in SEEDS]
        b.scheduler.script, b.scheduler.hold = lambda request: [73, 74, 75, 76], False
        for _ in range(count):
            tree, kv = rng.choice(trees)
            data = _packed(change_tree(tree, rng, rng.choice((0, 1, 1, 2, 4))), kv)
            if rng.random() < 0.1:
                data = change_bytes(data, rng)
            answer = await b.http.post(
                f"/restore?kv={rng.choice(('require', 'prefer', 'ignore'))}",
                content=data,
                headers={"Content-Type": SNAPSHOT_TYPE},
            )
            statuses[answer.status_code] += 1
            assert answer.status_code < 500 or answer.status_code == 503, answer.text
            assert b.client.num_live == 0
    return statuses


async def _tree(b: Bench, path: str, body: dict[str, Any]) -> tuple[Any, bytes]:
    """A snapshot of a request behind two tokens: its head as a tree, and its KV."""
    b.scheduler.script, b.scheduler.hold = lambda request: [73, 74], True
    b.scheduler.kv = [b"abcdefgh"]
    call = asyncio.create_task(b.http.post(path, json={**body, "rid": "r"}))
    await until(lambda: bool(b.scheduler._held))
    data = (await b.http.post("/extract", json={"rid": "r", "kv": "bytes"})).content
    await call
    return msgspec.msgpack.decode(data[HEAD:-8]), data[-8:]


def _packed(tree: Any, kv: bytes) -> bytes:
    head = msgspec.msgpack.encode(tree)
    digest = hashlib.sha256(head + kv).digest()
    return struct.pack("<6sHQQ32s", MAGIC, SNAPSHOT_VERSION, len(head), len(kv), digest) + head + kv
