"""An update of the weights on one rank: what it waits for, what it holds, and what it leaves as it was."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from pdserve.protocol.messages import AbortRequest, CommandReply, OutputBatch, PauseGeneration
from pdserve.protocol.weights import EndWeightsUpdate, HoldRequests, InstallWeights, PrepareWeights
from pdserve.scheduler.roles.prefill import PrefillRole
from pdserve.scheduler.weights_update import SWAP_S, InstalledWeights, WeightsUpdater
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import MemoryKey
from tests.unit.scheduler.kit import Mono

LONG = list(range(5, 45))


class Weights:
    """Weights that load when the test says so."""

    def __init__(self) -> None:
        self.result: str | None = None
        self.all_there = True
        self.events: list[str] = []
        self.refused: dict[str, str] = {}

    def begin(self, command: PrepareWeights) -> None:
        self.events.append(f"load {command.model_path}")

    def refuse(self, query_id: str, why: str) -> None:
        self.refused[query_id] = why

    def loaded(self) -> str | None:
        return self.result

    def end_wait(self) -> None:
        pass

    def may_install(self, query_id: str) -> bool:
        return self.all_there

    def install(self, version: str | None) -> InstalledWeights:
        self.events.append(f"install {version}")
        return InstalledWeights(f"{version}@x", {"weight_version": version})

    def drop(self) -> None:
        self.events.append("drop")


class Updated(Mono):
    """An aggregated server whose weights change."""

    def __init__(self, *, prefix_cache: bool = True, num_rows: int = 1) -> None:
        super().__init__(prefix_cache=prefix_cache, num_rows=num_rows)
        self.weights = Weights()
        self.scheduler.weights = WeightsUpdater(self.weights, self.clock, self.sent.append)

    def ask(self, command: PrepareWeights | HoldRequests | InstallWeights | EndWeightsUpdate) -> None:
        self.mailbox.post(command)
        self.step()

    def hold(self, query_id: str = "hold", *, abort_all: bool = False) -> None:
        self.ask(HoldRequests(query_id=query_id, abort_all=abort_all, timeout_s=5.0))

    def install(self, version: str = "v2") -> None:
        self.ask(InstallWeights(query_id="install", weight_version=version))

    @property
    def ends(self) -> list[tuple[str, int, str]]:
        """Status and code of all requests that ended with a failure."""
        outputs = (one for message in self.sent if isinstance(message, OutputBatch) for one in message.outputs)
        failed = [(one.rid, one.finish) for one in outputs if one.finish is not None and one.finish.type == "abort"]
        return [(rid, finish.status_code or 0, finish.err_type or "") for rid, finish in failed]

    @property
    def final(self) -> list[str]:
        """The commands whose failure ends them at all replicas."""
        return [one.query_id for one in self.sent if isinstance(one, CommandReply) and one.is_final]

    @property
    def replies(self) -> dict[str, str]:
        """What each command was told."""
        return {one.query_id: one.message for one in self.sent if isinstance(one, CommandReply)}


def test_running_requests_end_with_the_old_weights_and_those_behind_them_wait_for_the_new() -> None:
    mono = Updated()
    mono.post("running", max_new_tokens=4)
    mono.step()
    mono.post("queued", max_new_tokens=2)
    mono.step()
    mono.ask(PrepareWeights(query_id="prepare", model_path="there"))
    mono.hold()
    mono.post("new", max_new_tokens=2)
    mono.install()
    assert mono.replies == {"install": "no hold is in effect: requests may run"}
    while "hold" not in mono.replies:
        assert not {"queued", "new"} & mono.step().keys()
    assert len(mono.tokens("running")) == 4 and not mono.tokens("queued")
    mono.install()
    assert mono.replies["install"] == "the weights are still being loaded"
    mono.weights.result = ""
    mono.step()
    mono.install()
    assert mono.replies["prepare"] == mono.replies["install"] == "ok"
    assert mono.memory.counts()["pages_cached"] == 0 and mono.scheduler.facts["weight_version"] == "v2"
    assert mono.weights.events == ["drop", "load there", "install v2"]
    mono.ask(EndWeightsUpdate(query_id="end"))
    mono.run()
    assert len(mono.tokens("queued")) == len(mono.tokens("new")) == 2
    assert mono.context.counters["requests"] == 3 and not mono.scheduler.audit()


def test_all_requests_are_aborted_when_the_caller_says_so() -> None:
    mono = Updated()
    for rid in ("a", "b"):
        mono.post(rid, max_new_tokens=8)
    mono.step()
    mono.hold(abort_all=True)
    mono.step()
    assert mono.replies["hold"] == "ok" and not mono.scheduler.role.live
    assert mono.context.counters["requests_aborted"] == 2


def test_a_request_that_does_not_end_in_time_keeps_the_weights_and_the_held_ones_go_on() -> None:
    mono = Updated()
    mono.post("running", LONG[:8], max_new_tokens=20)
    mono.step()
    mono.hold()
    mono.post("new", max_new_tokens=1)
    mono.step()
    mono.clock.advance(6.0)
    mono.step()
    assert mono.replies["hold"] == "requests have not ended within 5 s" and mono.scheduler.weights is not None
    assert mono.scheduler.weights.num_held == 0 and not mono.scheduler.weights.is_pending
    mono.run()
    assert len(mono.tokens("new")) == 1 and len(mono.tokens("running")) == 20


def test_a_hold_that_nobody_ends_ends_by_itself() -> None:
    mono = Updated()
    mono.hold()
    mono.step()
    mono.post("new", max_new_tokens=1)
    mono.step()
    assert mono.replies == {"hold": "ok"} and not mono.tokens("new")
    mono.clock.advance(6.0 + SWAP_S)
    mono.run()
    assert len(mono.tokens("new")) == 1


def test_replicas_that_compute_together_are_waited_for() -> None:
    """From the command on health probes are held too, and no time ends the hold: the others may have swapped."""
    mono = Updated()
    mono.weights.all_there = False
    mono.hold()
    mono.post("early", max_new_tokens=1, probe=True)
    mono.run()
    assert len(mono.tokens("early")) == 1
    mono.install()
    mono.post("late", max_new_tokens=1, probe=True)
    mono.clock.advance(6.0 + SWAP_S)
    mono.step()
    assert mono.replies == {"hold": "ok"} and not mono.tokens("late")
    mono.weights.all_there = True
    mono.step()
    assert mono.replies["install"] == "ok" and mono.weights.events == ["install v2"]
    mono.step()
    assert not mono.tokens("late"), "another replica may have the former weights"
    mono.ask(EndWeightsUpdate(query_id="end"))
    mono.run()
    assert len(mono.tokens("late")) == 1


def test_an_update_that_waits_for_other_replicas_can_be_ended() -> None:
    mono = Updated()
    mono.weights.all_there = False
    mono.hold()
    mono.step()
    mono.install()
    mono.post("new", max_new_tokens=1)
    mono.ask(EndWeightsUpdate(query_id="end"))
    mono.run()
    assert mono.replies["install"] == "the update was ended" and len(mono.tokens("new")) == 1


def test_held_requests_can_be_aborted_and_their_ids_are_in_use() -> None:
    mono = Updated()
    mono.post("running", max_new_tokens=9)
    mono.step()
    mono.post("queued")
    mono.step()
    mono.hold()
    for rid in ("new", "new", "running"):
        mono.post(rid)
    mono.step()
    assert mono.ends == [("new", 409, "rid_in_use"), ("running", 409, "rid_in_use")]
    for rid in ("queued", "new"):
        mono.mailbox.post(AbortRequest(rid=rid))
    mono.step()
    assert mono.ends[2:] == [("queued", 499, "aborted"), ("new", 499, "aborted")]
    mono.ask(EndWeightsUpdate(query_id="end"))
    mono.run()
    assert len(mono.tokens("running")) == 9 and not mono.scheduler.audit()


def test_a_request_that_has_tokens_of_the_former_weights_is_refused() -> None:
    mono = Updated()
    mono.hold()
    mono.post("resumed")
    posted = mono.mailbox.drain()
    for one in posted:
        mono.mailbox.post(msgspec.structs.replace(one, prior_output_ids=[7]))  # type: ignore[type-var]
    mono.step()
    mono.install()
    mono.ask(EndWeightsUpdate(query_id="end"))
    assert mono.ends == [("resumed", 409, "weights_changed")]


def test_weights_that_cannot_be_used_are_named_and_nothing_is_installed() -> None:
    mono = Updated()
    mono.ask(PrepareWeights(query_id="a", model_path="there"))
    mono.ask(PrepareWeights(query_id="b", model_path="elsewhere"))
    assert mono.replies == {"b": "other weights are being loaded"} == mono.weights.refused
    mono.weights.result = "1 tensors are missing"
    mono.step()
    assert mono.replies["a"] == "1 tensors are missing" and mono.final == ["b"]
    mono.ask(EndWeightsUpdate(query_id="end"))
    assert mono.weights.events == ["drop", "load there", "drop"]


def test_an_update_that_ends_while_a_rank_loads_drops_what_is_loaded() -> None:
    mono = Updated()
    mono.ask(PrepareWeights(query_id="a", model_path="there"))
    mono.ask(EndWeightsUpdate(query_id="end"))
    mono.weights.result = ""
    mono.step()
    assert mono.replies == {"end": "ok", "a": "the update was ended"} and mono.weights.events[-1] == "drop"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_paused_requests_cannot_end_so_the_update_is_refused(mode: str) -> None:
    mono = Updated()
    mono.post("running", max_new_tokens=9)
    mono.step()
    mono.mailbox.post(PauseGeneration(query_id="p", mode=mode))  # type: ignore[arg-type]
    mono.step()
    mono.hold()
    assert mono.replies["hold"] == "generation is paused with 1 requests, which cannot end"


@pytest.mark.parametrize(
    ("key", "state", "withdrawn"),
    [
        (None, KVPoll.BOOTSTRAPPING, True),
        (MemoryKey(1, 1, "decode"), KVPoll.BOOTSTRAPPING, False),
        (None, KVPoll.FAILED, False),
    ],
)
def test_a_prompt_whose_decode_server_is_known_is_not_withdrawn(
    key: MemoryKey | None, state: KVPoll, withdrawn: bool
) -> None:
    """Its pages are known to this room alone, also while the ranks still connect. The next room would wait for them."""
    role = PrefillRole.__new__(PrefillRole)
    req = SimpleNamespace(rid="r", sender=SimpleNamespace(key=key, poll=lambda: state))
    role._bootstrap, role._optimistic = {"r": req}, ()  # type: ignore[assignment, dict-item]
    assert role._may_withdraw(req) is withdrawn  # type: ignore[arg-type]
