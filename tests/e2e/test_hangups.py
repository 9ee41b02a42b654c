"""30 chats at once through the router, a tenth of whose clients hang up: the others notice nothing, nothing stays."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.e2e.clients import chat_all
from tests.e2e.harness import assert_idle, running_pair

NUM_CLIENTS = 30


@pytest.mark.slow
def test_clients_that_hang_up_disturb_nobody(smollm2_directory: Path) -> None:
    rng = random.Random(7)
    bodies, delays, patience = [], [], []
    for i in range(NUM_CLIENTS):
        words = " ".join(rng.choice(("red", "green", "blue", "seven", "eleven")) for _ in range(rng.randint(1, 40)))
        bodies.append(
            {
                "model": "smollm2",
                "messages": [{"role": "user", "content": f"{i}: {words}"}],
                "max_tokens": rng.randint(1, 16),
                "temperature": 0,
                "ignore_eos": True,
                "stream": rng.random() < 0.5,
            }
        )
        delays.append(rng.uniform(0, 1))
        patience.append(rng.uniform(0, 10) if i % 10 == 0 else None)
    with running_pair(str(smollm2_directory), "--served-model-name", "smollm2", "--max-total-tokens", "16384") as pair:
        outcomes = asyncio.run(chat_all(pair.router.url, bodies, delays, patience))
        stayed = [outcome for outcome, limit in zip(outcomes, patience, strict=True) if limit is None]
        assert len(stayed) == NUM_CLIENTS * 9 // 10
        for outcome in stayed:
            assert (outcome.status, outcome.error, outcome.finish) == (200, None, "length"), outcome
        assert sum(outcome.hung_up for outcome in outcomes) > 0, "some clients must have hung up for this to mean much"
        assert_idle(pair.prefill, pair.decode)
        assert (
            pair.prefill.state()["counters"]["requests_aborted"] + pair.decode.state()["counters"]["requests_aborted"]
            > 0
        )
        for server in (pair.prefill, pair.decode):
            values, memory = server.metrics(), server.state()["memory"]
            assert values["pdserve:pages_free"] + values["pdserve:pages_evictable"] == memory["pages_total"]
            assert values["pdserve:pages_total"] == memory["pages_total"]
            assert values["pdserve:rooms_live"] == values["pdserve:pages_held_remote"] == 0
            assert values["pdserve:audit_differences"] == 0
