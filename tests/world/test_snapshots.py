"""Requests that are extracted, restored and go on elsewhere have the monolith's tokens; planted bugs are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from pdserve.executor.interface import HostPages
from pdserve.protocol.messages import ExtractReply, KVPart
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.request import Req
from pdserve.scheduler.retracted_kv import RetractedKV
from pdserve.scheduler.scheduler import Scheduler
from pdserve.scheduler.snapshots import RequestExtractor
from tests.world.pressure import assert_caught
from tests.world.snapshots import SnapshotWorld, play_snapshots

Patch = pytest.MonkeyPatch
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seeds", [range(16), pytest.param(range(16, 2000), marks=SLOW)], ids=len)
def test_a_request_goes_on_with_the_same_tokens(seeds: range) -> None:
    counts = Counter[str]()
    for seed in seeds:
        counts += play_snapshots(seed)
    for name in ("taken", "with KV", "KV loaded", "without output", "length", "stop"):
        assert counts[name] > len(seeds) / 2, counts


def forget_the_last_token(patch: Patch) -> None:
    extract = RequestExtractor.extract

    def short(self: RequestExtractor, query_id: str, req: Req, *, with_kv: bool) -> ExtractReply:
        reply = extract(self, query_id, req, with_kv=with_kv)
        return msgspec.structs.replace(reply, output_ids=reply.output_ids[:-1])

    patch.setattr(RequestExtractor, "extract", short)


def count_one_token_of_kv_too_many(patch: Patch) -> None:
    take_saved = SchedulerContext.take_saved

    def beyond(self: SchedulerContext, req: Req, saved: HostPages, num_tokens: int) -> None:
        take_saved(self, req, saved, num_tokens)
        req.computed = req.planned = num_tokens + 1

    patch.setattr(SchedulerContext, "take_saved", beyond)


def take_the_output_for_a_prompt(patch: Patch) -> None:
    """Penalties, grammar and limits count from the output's start: they are lost."""
    restore = SnapshotWorld._restore

    def forgetful(self: SnapshotWorld, leg: object, data: bytes) -> None:
        restore(self, leg, data)  # type: ignore[arg-type]
        rid = next(reversed(self._legs))
        spec = self._legs[rid].spec
        posted = self._legs[rid].node.mailbox._events  # type: ignore[attr-defined]
        posted[-1] = msgspec.structs.replace(
            spec,
            input_ids=spec.given_ids,
            prior_output_ids=[],
            sampling=msgspec.structs.replace(
                spec.sampling, max_new_tokens=spec.sampling.max_new_tokens - len(spec.prior_output_ids)
            ),
        )

    patch.setattr(SnapshotWorld, "_restore", forgetful)


def lose_the_seed(patch: Patch) -> None:
    restore = RequestExtractor.restore

    def other(self: RequestExtractor, req: Req) -> None:
        if req.spec.prior_output_ids:
            sampling = msgspec.structs.replace(req.spec.sampling, seed=None)
            req.spec = msgspec.structs.replace(req.spec, sampling=sampling)
        restore(self, req)

    patch.setattr(RequestExtractor, "restore", other)


def give_it_the_kv_of_another_request(patch: Patch) -> None:
    arrived, last = RequestExtractor.arrived, dict[tuple[int, int], bytes]()

    def mixed(self: RequestExtractor, part: KVPart) -> None:
        key = part.group, len(part.data)
        other = last.get(key, part.data)
        last[key] = part.data
        arrived(self, msgspec.structs.replace(part, data=other))

    patch.setattr(RequestExtractor, "arrived", mixed)


def copy_while_a_step_is_under_way(patch: Patch) -> None:
    patch.setattr(Scheduler, "process_all_results", lambda self: None)
    patch.setattr(SchedulerContext, "no_step_in_flight", property(lambda self: True))


def keep_the_memory_of_what_was_stopped(patch: Patch) -> None:
    forget = RetractedKV.forget
    patch.setattr(RetractedKV, "forget", lambda self, req: None if req.spec.kv_tokens else forget(self, req))


BUGS: tuple[Callable[[Patch], None], ...] = (
    forget_the_last_token,
    count_one_token_of_kv_too_many,
    take_the_output_for_a_prompt,
    lose_the_seed,
    give_it_the_kv_of_another_request,
    copy_while_a_step_is_under_way,
    keep_the_memory_of_what_was_stopped,
)


@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    assert_caught(play_snapshots, 60, Exception)
