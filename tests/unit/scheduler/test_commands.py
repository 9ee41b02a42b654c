"""Pause, go on, flush and profile, as the scheduler obeys them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.executor.profiling import Profiler
from pdserve.protocol.messages import (
    CommandReply,
    ContinueGeneration,
    DeclarePeerDead,
    FlushCache,
    GenerateRequest,
    KVPart,
    OutputBatch,
    PauseGeneration,
    RoomAddress,
    StartProfile,
    StopProfile,
    ToApi,
)
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.snapshots import RequestExtractor
from pdserve.sim.network import Faults
from pdserve.sim.world import Shape, World
from tests.unit.scheduler.kit import Mono
from tests.waiting import wait_until


def _replies(mono: Mono) -> list[tuple[str, bool]]:
    return [(message.query_id, message.ok) for message in mono.sent if isinstance(message, CommandReply)]


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_computed_until_it_goes_on(overlap: bool) -> None:
    mono = Mono(overlap=overlap)
    mono.post("early", max_new_tokens=6)
    for _ in range(3):
        mono.step()
    mono.mailbox.post(PauseGeneration(query_id="p", mode="in_place"))
    assert mono.step() == {}
    before = list(mono.tokens("early"))
    mono.post("late", max_new_tokens=2)
    for _ in range(3):
        assert mono.step() == {}
    assert mono.tokens("early") == before and not mono.tokens("late")
    mono.mailbox.post(ContinueGeneration(query_id="c"))
    mono.run()
    assert len(mono.tokens("early")) == 6 and len(mono.tokens("late")) == 2
    assert _replies(mono) == [("p", True), ("c", True)]


def test_what_was_retracted_has_no_memory_and_comes_to_the_same() -> None:
    plain, mono = Mono(), Mono()
    for one in (plain, mono):
        one.post("a", max_new_tokens=8)
    plain.run()
    for _ in range(3):
        mono.step()
    mono.mailbox.post(FlushCache(query_id="too soon"))
    mono.mailbox.post(PauseGeneration(query_id="p", mode="retract"))
    mono.mailbox.post(FlushCache(query_id="f"))
    mono.step()
    assert mono.memory.pages.num_free == mono.memory.pages.num_total
    mono.mailbox.post(ContinueGeneration(query_id="c"))
    mono.run()
    assert mono.tokens("a") == plain.tokens("a")
    assert _replies(mono) == [("too soon", False), ("p", True), ("f", True), ("c", True)]


def test_a_pause_ends_what_runs_unless_told_otherwise() -> None:
    mono = Mono()
    mono.post("a", max_new_tokens=8)
    mono.step()
    mono.mailbox.post(PauseGeneration(query_id="p"))
    mono.step()
    assert not mono.scheduler.role.live
    mono.post("b", max_new_tokens=1)
    mono.step()
    assert not mono.tokens("b")
    mono.mailbox.post(ContinueGeneration(query_id="c"))
    mono.run()
    assert len(mono.tokens("b")) == 1


def test_a_prompt_alone_leaves_no_token_and_no_memory() -> None:
    mono = Mono()
    mono.post("a", max_new_tokens=0)
    mono.run()
    (output,) = mono.outputs("a")
    assert output.token_ids == [] and output.finish is not None and output.finish.length == 0
    assert mono.all_free()


def _wait_for(path: Path) -> None:
    wait_until(path.exists, str(path), 60.0)
    assert path.stat().st_size > 0


class _Trace:
    def __init__(self) -> None:
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def export_chrome_trace(self, path: str) -> None:
        assert self.stopped
        Path(path).write_text("{}")


def test_a_profile_ends_by_itself_after_so_many_steps(tmp_path: Path) -> None:
    profiler = Profiler("TP-0", lambda order: _Trace())
    order = StartProfile(query_id="q", output_dir=str(tmp_path / "new"), profile_id="x", num_steps=2)
    assert profiler.start(order)[0] and not profiler.start(order)[0]
    profiler.step()
    assert not list(tmp_path.rglob("*.gz"))
    profiler.step()
    _wait_for(tmp_path / "new" / "x-TP-0.trace.json.gz")
    ok, why = profiler.stop()
    assert not ok and "no profile" in why
    (tmp_path / "file").write_text("")
    ok, why = profiler.start(StartProfile(query_id="q", output_dir=str(tmp_path / "file")))
    assert not ok and "file" in why


def test_torchs_profiler_writes_what_was_computed(tmp_path: Path) -> None:
    mono = Mono()
    mono.mailbox.post(StartProfile(query_id="s", output_dir=str(tmp_path), profile_id="p", activities=("CPU",)))
    mono.post("a", max_new_tokens=2)
    mono.run()
    mono.mailbox.post(StopProfile(query_id="e"))
    mono.step()
    assert _replies(mono) == [("s", True), ("e", True)]
    _wait_for(tmp_path / "p-TP-0.trace.json.gz")


def test_a_peer_that_is_declared_dead_has_no_session_any_more() -> None:
    world = World(3, Shape(), Faults(repeated=0.0, max_delay_s=0.1))
    scheduler, kv = world.decode.scheduler, world.decode.kv
    assert kv is not None
    room = RoomAddress(host=World.ADDRESS[0], port=World.ADDRESS[1], room=1)
    params = CoreSamplingParams(max_new_tokens=2)
    world.decode.mailbox.post(GenerateRequest(rid="r", input_ids=[5, 6, 7], sampling=params, room=room))
    for _ in range(300):
        world.clock.advance(0.25)
        world.net.deliver()
        world.prefill.scheduler.step()
        scheduler.step()
        peers = scheduler.state().peers
        if any(peer.state == "ready" for peer in peers):
            break
    (peer,) = peers
    assert peer.state == "ready"
    sent: list[ToApi] = []
    scheduler.context.outbox.send = sent.append  # type: ignore[method-assign]
    for instance in ("nobody", peer.instance):
        world.decode.mailbox.post(DeclarePeerDead(query_id=instance, instance=instance))
    scheduler.step()
    replies = [message for message in sent if isinstance(message, CommandReply)]
    assert [(reply.query_id, reply.ok) for reply in replies] == [("nobody", False), (peer.instance, True)]
    assert "'nobody'" in replies[0].message and peer.instance in replies[1].message
    assert not any(one.state == "ready" for one in scheduler.state().peers)
    (finish,) = [one.finish for batch in sent if isinstance(batch, OutputBatch) for one in batch.outputs]
    assert finish is not None and finish.type == "abort" and finish.err_type == "peer_gone"


def test_the_kv_of_a_restored_request_that_is_refused_is_dropped() -> None:
    mono = Mono()
    layout = mono.memory.layout
    pages = RequestExtractor(mono.context).num_pages(4)
    for index, (group, count) in enumerate(zip(layout.groups, pages, strict=True)):
        mono.mailbox.post(KVPart(rid="r", group=index, data=bytes(group.bytes_of(count))))
    sampling = CoreSamplingParams(max_new_tokens=100_000)
    mono.mailbox.post(GenerateRequest(rid="r", input_ids=[5, 6, 7, 8, 9], sampling=sampling, kv_tokens=4))
    mono.step()
    assert mono.finish("r").failure is not None
    assert mono.context.offloaded_bytes == 0 and not mono.scheduler.audit()
