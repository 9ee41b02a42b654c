"""Requests that are stopped at random moments and go on elsewhere, as values. Shared with the tests.

A pair, and an aggregated server beside it. A request of the pair is extracted from decode, with or without the bytes of
its KV, and is restored at decode or at the aggregated server, where it may be extracted again.

`python -m tests.world.snapshots --seeds 2000` plays seeds on all cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import multiprocessing
import random
import sys
from collections import Counter

import msgspec

from pdserve.protocol.messages import ExtractRequest, GenerateRequest, KVPart
from pdserve.protocol.snapshot import (
    KVIdentity,
    RequestSnapshot,
    SnapshotGroup,
    SnapshotKV,
    decode,
    encode,
)
from pdserve.sim.network import Faults
from pdserve.sim.node import SimNode, monolith_tokens
from pdserve.sim.shape import Prompt, Shape, request
from pdserve.sim.world import World
from tests.world.pressure import pressured
from tests.world.workload import with_drafts, with_groups, with_states, workload

FAULTS = Faults(lost=0.05, max_delay_s=0.6, abort=0.003, copy_failed=0.01)
MAX_STEPS = 20_000


@dataclasses.dataclass
class Leg:
    """A request at one of the servers it has been at: `prior` are the output tokens of the legs before."""

    index: int
    node: SimNode
    spec: GenerateRequest
    prior: list[int]


class SnapshotWorld(World):
    """A pair whose requests are stopped and restored. `ends`: tokens of the requests that ended elsewhere, by index."""

    def __init__(self, seed: int, shape: Shape, faults: Faults, prompts: list[Prompt]) -> None:
        super().__init__(seed, shape, faults)
        self.mono = SimNode("null", shape, self.net, "mono", "mono")
        self.counts = Counter[str]()
        self.ends: dict[int, list[int]] = {}
        self._prompts = prompts
        self._asked: dict[str, Leg] = {}
        self._legs: dict[str, Leg] = {}
        self._stopped: list[tuple[Leg, bytes]] = []
        self._names = iter(range(1 << 20))

    def misfortune(self, rooms: dict[int, tuple[int, SimNode, SimNode]]) -> None:
        """See `World`. Also stops and restores requests."""
        super().misfortune(rooms)
        if self.rng.random() < 0.15:
            in_rooms = [(f"r{index}", self._first_leg(index, node)) for index, _, node in rooms.values()]
            self._ask([one for one in in_rooms if one[0] not in self._asked] + list(self._legs.items()))
        self.turn()

    def finish(self) -> None:
        """Play on until every stopped request has ended."""
        for _ in range(MAX_STEPS):
            if not self._stopped and not self._legs and self.mono.idle and self.decode.idle:
                return
            self.clock.advance(0.25)
            self.net.deliver()
            self.turn()
            self.decode.step()
        raise AssertionError(f"stuck: {len(self._stopped)} stopped, {list(self._legs)} live")

    def turn(self) -> None:
        """Run a turn of the aggregated server, take snapshots that are ready, and restore some."""
        self.mono.step()
        for rid, leg in list(self._asked.items()):
            if rid in leg.node.extracted:
                self._take(rid, leg)
        if self._stopped and self.rng.random() < 0.3:
            self._restore(*self._stopped.pop(self.rng.randrange(len(self._stopped))))
        for rid, leg in list(self._legs.items()):
            half = leg.node.halves[rid]
            if half.finish is not None:
                del self._legs[rid]
                self.counts[half.finish.type] += 1
                if half.finish.type in ("stop", "length"):
                    self.ends[leg.index] = leg.prior + half.tokens

    # ------------------------------------------------------------------ inside

    def _first_leg(self, index: int, node: SimNode) -> Leg:
        return Leg(index, node, request(f"r{index}", self._prompts[index], None), [])

    def _ask(self, live: list[tuple[str, Leg]]) -> None:
        if not live:
            return
        rid, leg = self.rng.choice(live)
        self._asked[rid] = leg
        with_kv = self.rng.random() < 0.6
        leg.node.mailbox.post(ExtractRequest(query_id=rid, rid=rid, with_kv=with_kv, keep=False))

    def _take(self, rid: str, leg: Leg) -> None:
        """Make the snapshot as a server does, out of what the scheduler tells."""
        reply = leg.node.extracted.pop(rid)
        parts = leg.node.kv_parts.pop(rid, [])
        del self._asked[rid]
        half = leg.node.halves[rid]
        assert half.finish is not None and half.finish.type == "suspended", half.finish
        assert reply.output_ids == leg.prior + half.tokens, f"{rid}: the snapshot has other tokens than the client"
        self._legs.pop(rid, None)
        self.counts["taken"] += 1
        self.counts["with KV"] += reply.kv_tokens > 0
        self.counts["without output"] += not reply.output_ids
        layout, kv, data = leg.node.layout, None, list[bytes]()
        if reply.kv_tokens:
            groups = zip(layout.groups, reply.kv_pages, strict=True)
            kv = SnapshotKV(
                num_tokens=reply.kv_tokens,
                groups=tuple(SnapshotGroup(num_pages=pages, page_bytes=group.page_bytes) for group, pages in groups),
            )
            data = [part.data for part in sorted(parts, key=lambda part: part.group)]
        snapshot = RequestSnapshot(
            rid=rid,
            model="hash",
            identity=KVIdentity(
                weights="", layout=layout.fingerprint(), dtype="", page_tokens=layout.page_tokens, adapter=reply.adapter
            ),
            input_ids=leg.spec.input_ids,
            output_ids=reply.output_ids,
            sampling=leg.spec.sampling,
            kv=kv,
        )
        self._stopped.append((leg, encode(snapshot, data)))

    def _restore(self, leg: Leg, data: bytes) -> None:
        snapshot, kv = decode(data)
        node = self.rng.choice((self.mono, self.decode))
        rid = f"{snapshot.rid.partition('+')[0]}+{next(self._names)}"
        spec = msgspec.structs.replace(
            leg.spec,
            rid=rid,
            input_ids=snapshot.input_ids,
            sampling=snapshot.sampling,
            prior_output_ids=snapshot.output_ids,
            local=True,
        )
        same_layout = snapshot.identity.layout == node.layout.fingerprint()
        if snapshot.kv is not None and same_layout:
            for group, own in enumerate(snapshot.kv.split(kv)):
                node.mailbox.post(KVPart(rid=rid, group=group, data=bytes(own)))
            spec = msgspec.structs.replace(spec, kv_tokens=snapshot.kv.num_tokens)
            self.counts["KV loaded"] += 1
        node.mailbox.post(spec)
        self._legs[rid] = Leg(leg.index, node, spec, list(snapshot.output_ids))


def setting(seed: int) -> tuple[Shape, list[Prompt]]:
    """A seeded shape of every kind of model, under pressure in every second seed."""
    rng = random.Random(f"snapshots {seed}")
    shape, prompts = pressured(seed) if seed % 2 else workload(seed)
    shape = dataclasses.replace(shape, overlap=rng.random() < 0.5, late=rng.random() < 0.5)
    kind = seed // 2 % 4
    longest = max(len(prompt.tokens) + prompt.max_new_tokens for prompt in prompts)
    if kind == 1:
        shape = with_groups(shape, rng, longest)
    elif kind == 2:
        shape = with_states(shape, rng)
    shape, prompts = with_drafts(shape, prompts, rng)
    if kind != 3:
        shape = dataclasses.replace(shape, drafting=None)
    return shape, prompts


def play_snapshots(seed: int) -> Counter[str]:
    """Run a seed and hold it against the oracle; returns what happened.

    Raises AssertionError for a token that is not the monolith's, and for memory that is not free.
    """
    shape, prompts = setting(seed)
    expected = monolith_tokens(shape, prompts)
    world = SnapshotWorld(seed, shape, FAULTS, prompts)
    halves = world.run(prompts, num_rooms=6)
    world.finish()
    for index, half in enumerate(halves):
        if half is not None and half.finish is not None and half.finish.type in ("stop", "length"):
            assert half.tokens == expected[index], f"seed {seed}, request {index}: tokens differ from the monolith's"
    for index, tokens in world.ends.items():
        assert tokens == expected[index], f"seed {seed}, restored request {index}: tokens differ from the monolith's"
    for node in (world.prefill, world.decode, world.mono):
        assert not node.leaks(), f"seed {seed}: {node.mode} still has {node.leaks()}"
    return world.counts


def main() -> None:
    """Play many seeds on all cores; print what happened, and the seeds that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    counts, failed = Counter[str](), list[str]()
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        seeds = range(given.first, given.first + given.seeds)
        for found, failure in pool.imap_unordered(_play_one, seeds, chunksize=20):
            counts += found
            if failure is not None:
                failed.append(failure)
                print(failure, file=sys.stderr, flush=True)
    print(f"{given.seeds} seeds: {dict(counts)}")
    print("\n".join(failed) or "every request that ended has the monolith's tokens, and nothing is left")
    sys.exit(bool(failed))


def _play_one(seed: int) -> tuple[Counter[str], str | None]:
    logging.disable(logging.CRITICAL)
    try:
        return play_snapshots(seed), None
    except Exception as error:
        return Counter(), f"seed {seed}: {type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
