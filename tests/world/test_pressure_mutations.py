"""A test of the tests: bugs of scheduling and memory, planted one by one, must make the pressed world fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pdserve.memory.cached_states import RadixNode
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.layer_events import ALL_WRITTEN, LayerEvents
from pdserve.memory.lease import Lease
from pdserve.memory.prefix_cache import RadixTree
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.decode_batch import DecodeBatch
from pdserve.scheduler.request import Req
from pdserve.sim.hash_lm import HashExecutor
from pdserve.transfer.handles import KVReceiver, KVSender
from tests.world.pressure import FAULTS, press

Patch = pytest.MonkeyPatch
MAX_SEEDS = 150


def free_while_a_step_is_under_way(patch: Patch) -> None:
    release_row, leave = SchedulerContext.release_row, SchedulerContext.leave_device

    def freeing(release: Callable[[SchedulerContext, Req], None]) -> Callable[[SchedulerContext, Req], None]:
        def hasty(self: SchedulerContext, req: Req) -> None:
            release(self, req)
            while self._deferred_frees:
                self._free(self._deferred_frees.popleft())

        return hasty

    patch.setattr(SchedulerContext, "release_row", freeing(release_row))
    patch.setattr(SchedulerContext, "leave_device", freeing(leave))


def cache_a_page_that_is_not_computed(patch: Patch) -> None:
    cache = KVMemory.cache

    def hasty(self: KVMemory, lease: Lease, token_ids: bytes, priority: int = 0, *, ending: bool = False) -> None:
        whole = len(lease.pages) * self.layout.page_tokens * 4
        cache(
            self,
            lease,
            token_ids + bytes(max(0, whole - len(token_ids))) if token_ids else b"",
            priority,
            ending=ending,
        )

    patch.setattr(KVMemory, "cache", hasty)


def forget_locks(patch: Patch) -> None:
    def nothing(self: RadixTree, node: RadixNode) -> None:
        """Locks nothing."""

    patch.setattr(RadixTree, "lock", nothing)
    patch.setattr(RadixTree, "unlock", nothing)


def restore_nothing(patch: Patch) -> None:
    patch.setattr(HashExecutor, "restore", lambda self, saved, pages: None)


def resume_as_if_nothing_had_been_lost(patch: Patch) -> None:
    retract = SchedulerContext.retract

    def forgetful(self: SchedulerContext, req: Req) -> None:
        computed = req.computed
        retract(self, req)
        if req.saved is None:
            req.output_ids[:] = req.output_ids[: max(0, computed - req.num_prompt)]

    patch.setattr(SchedulerContext, "retract", forgetful)


def keep_the_pages_of_the_retracted(patch: Patch) -> None:
    leave = SchedulerContext.leave_device

    def clinging(self: SchedulerContext, req: Req) -> None:
        if req.num_retractions and req.lease is not None:
            req.lease.hold("send")
        leave(self, req)

    patch.setattr(SchedulerContext, "leave_device", clinging)


def send_layers_that_are_not_written(patch: Patch) -> None:
    send = KVSender.send

    def hasty(
        self: KVSender,
        lease: Lease,
        num_pages: int,
        layers: Sequence[range] = (),
        layer_events: LayerEvents = ALL_WRITTEN,
    ) -> None:
        send(self, lease, num_pages, layers, ALL_WRITTEN)

    patch.setattr(KVSender, "send", hasty)


def claim_one_page_more_than_decode_has(patch: Patch) -> None:
    publish = KVReceiver.publish

    def boastful(self: KVReceiver, lease: Lease, aux: Lease, cached_tokens: int, num_tokens: int) -> None:
        more = 8 if cached_tokens == 0 and len(lease.pages) > 8 else 0
        publish(self, lease, aux, cached_tokens + more, num_tokens)

    patch.setattr(KVReceiver, "publish", boastful)


def plan_beyond_the_lease(patch: Patch) -> None:
    patch.setattr(DecodeBatch, "is_short", property(lambda self: False))
    patch.setattr(SchedulerContext, "grow", lambda self, req, num_tokens: True)


MUTANTS: list[Callable[[Patch], None]] = [
    free_while_a_step_is_under_way,
    cache_a_page_that_is_not_computed,
    forget_locks,
    restore_nothing,
    resume_as_if_nothing_had_been_lost,
    keep_the_pages_of_the_retracted,
    send_layers_that_are_not_written,
    claim_one_page_more_than_decode_has,
    plan_beyond_the_lease,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda value: value.__name__)
def test_planted_bug_is_caught(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    for seed in range(MAX_SEEDS):
        try:
            press(seed, FAULTS)
        except (AssertionError, KeyError, IndexError):
            return
    pytest.fail(f"{mutant.__name__}: not caught in {MAX_SEEDS} seeds")
