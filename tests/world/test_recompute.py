"""Decode servers that compute prompts whose KV did not come: the monolith's tokens, and nothing left."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from pdserve.protocol.failure import Failure
from pdserve.sim.network import Faults
from pdserve.sim.world import World, monolith_tokens
from pdserve.transfer.receiver import ReceiveSide
from pdserve.transfer.room import ReceiveRoom
from tests.world.workload import workload

FAULTS = {
    "copies fail, and their bytes land late": Faults(copy_failed=0.1, lost=0.05),
    "servers are killed": Faults(kill=0.004, lost=0.05),
    "writes are not confirmed": Faults(note_lost=0.05),
    "clients abort": Faults(copy_failed=0.1, abort=0.05, lost=0.05),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 240), marks=pytest.mark.slow)], ids=len)
def test_decode_computes_what_did_not_come(name: str, seeds: range) -> None:
    play(FAULTS[name], seeds)


def test_a_pair_goes_on_from_the_output_of_an_earlier_try() -> None:
    """Prefill computes prompt and prior output together, and only new tokens are told."""
    for seed in range(6):
        shape, prompts = workload(seed)
        shape = dataclasses.replace(shape, overlap=seed % 2 == 0, decode_prefix_cache=seed % 3 == 0)
        whole = monolith_tokens(shape, prompts)
        cuts = [random.Random(seed + index).randrange(len(tokens)) for index, tokens in enumerate(whole)]
        resumed = [
            dataclasses.replace(prompt, prior=tuple(tokens[:cut]))
            for prompt, tokens, cut in zip(prompts, whole, cuts, strict=True)
        ]
        assert any(cuts)
        rests = [tokens[cut:] for tokens, cut in zip(whole, cuts, strict=True)]
        assert monolith_tokens(shape, resumed) == rests
        world = World(seed, shape, Faults(lost=0.05))
        assert [half and half.tokens for half in world.run(resumed, num_rooms=6)] == rests
        assert not world.prefill.leaks() and not world.decode.leaks()


def test_pages_that_the_peer_may_write_to_are_not_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug must be found: the published pages of a failed transfer are free at once."""
    fail = ReceiveSide.fail

    def freeing(self: ReceiveSide, room: ReceiveRoom, failure: Failure) -> None:
        fail(self, room, failure)
        self.published.release(room.key)

    monkeypatch.setattr(ReceiveSide, "fail", freeing)
    with pytest.raises(AssertionError):
        play(FAULTS["clients abort"], range(100))


def play(faults: Faults, seeds: range) -> None:
    """Run the seeds and hold each against the oracle."""
    ends, recomputed = Counter[str](), 0
    for seed in seeds:
        shape, prompts = workload(2 * seed + 1)
        shape = dataclasses.replace(
            shape,
            load_failure_policy="recompute",
            decode_prefix_cache=seed % 2 == 0,
            overlap=seed % 3 == 0,
            late=seed % 3 == 0,
        )
        world = World(seed, shape, faults)
        results = world.run(prompts, num_rooms=6)
        for index, (half, tokens) in enumerate(zip(results, monolith_tokens(shape, prompts), strict=True)):
            if half is None or half.finish is None:
                continue  # its decode server was killed
            ends[half.finish.type] += 1
            if half.finish.type == "abort":
                assert half.finish.err_type == "aborted", f"seed {seed}, request {index}: {half.finish}"
            else:
                assert half.tokens == tokens, f"seed {seed}, request {index}: tokens differ from the monolith's"
        for node in (world.prefill, world.decode):
            assert not node.leaks(), f"seed {seed}: {node.mode} still has {node.leaks()}"
        recomputed += sum(
            node.scheduler.context.counters["kv_loads_recomputed"] for node in (world.decode, *world.dead)
        )
    assert recomputed > 0 and ends["length"] > recomputed
    assert faults.abort or not ends["abort"]
