"""Changes the weights of a running engine: no request is computed with both.

    PrepareWeights ──> the ranks load beside the weights in use, and requests go on ──> all have them, or one has failed
    HoldRequests ──> requests that have not started return to a queue here, new ones join them ──> the last one ends
    InstallWeights ──> all ranks swap in the same turn; prefix cache and host tier are emptied; rooms carry the version
    EndWeightsUpdate ──> the held requests are admitted, in their order

Each rank has an updater, and the input log gives all ranks the same commands in the same turn. Only what has started is
waited for. That needs nothing of a peer but the end of transfers that began, so servers of a pair that hold at the same
time do not wait for each other. Scheduler thread.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from pdserve.base.clock import Clock
from pdserve.errors import RequestError
from pdserve.executor.interface import StepHandle
from pdserve.memory.page_keys import KeyNamespace
from pdserve.protocol.failure import CLIENT_ABORT, WEIGHTS_CHANGED, Failure
from pdserve.protocol.messages import (
    AbortRequest,
    CommandReply,
    EngineCoreOutput,
    FinishReason,
    GenerateRequest,
    OutputBatch,
    ToApi,
)
from pdserve.protocol.weights import (
    EndWeightsUpdate,
    HoldRequests,
    InstallWeights,
    JoinGroup,
    LeaveGroup,
    Preparation,
    PrepareTensors,
    PrepareWeights,
    WeightsCommand,
)
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.roles.base import SchedulerRole
from pdserve.transfer.manager import KVManager

log = logging.getLogger(__name__)

SWAP_S = 60.0
"""Seconds behind the time limit of a hold, and behind a swap, after which a hold ends by itself."""


@dataclasses.dataclass(frozen=True)
class InstalledWeights:
    """Weights that a rank has begun with. `name`: what rooms carry, see `weights_name`; `facts`: those that change.

    `namespace`: of their pages in the store; None: it stays, or there is no store.
    """

    name: str
    facts: Mapping[str, str | int | float | bool | None]
    namespace: KeyNamespace | None = None


class RankWeights(Protocol):
    """The weights of one rank. The composition roots of the ranks' processes make it."""

    def begin(self, command: Preparation) -> None:
        """Begin to load on this rank, beside the weights in use. One load at a time."""
        ...

    def refuse(self, query_id: str, why: str) -> None:
        """Tell replicas that compute with this one that it does not `begin` the command `query_id`, and why."""
        ...

    def loaded(self) -> str | None:
        """Return None while a rank loads; then once why they cannot be used, empty when all ranks have them.

        Equal on all ranks in the same turn. After a failure nothing is kept.
        """
        ...

    def end_wait(self) -> None:
        """The update has ended: `loaded` does not wait for other replicas any more, and its result is not used."""
        ...

    def may_install(self, query_id: str) -> bool:
        """Return whether `install` follows in this turn, for the command `query_id`. Equal on all ranks.

        Called each turn in which nothing runs, until it returns True or the update ends. Replicas that compute together
        install behind the same step.
        """
        ...

    def install(self, version: str | None) -> InstalledWeights:
        """Begin with the loaded weights, if there are any. No row is open.

        `version`: name of their version; None: it stays.
        """
        ...

    def drop(self) -> None:
        """Forget loaded weights that were not installed."""
        ...


class UpdatableWeights(abc.ABC):
    """Mixin of `Scheduler`: what an update of the weights needs of it."""

    role: SchedulerRole
    context: SchedulerContext
    kv: KVManager | None
    weights: WeightsUpdater | None
    """None: the weights of this engine stay."""
    facts: dict[str, str | int | float | bool | None]
    under_way: deque[StepHandle]
    paused: bool
    """Whether `PauseGeneration` has stopped the computation."""

    @abc.abstractmethod
    def admit_request(self, spec: GenerateRequest, *, again: bool = False) -> None:
        """Admit a new request, or `again` one that was withdrawn: it keeps its place and is counted once."""

    @abc.abstractmethod
    def abort_requests(self, abort: AbortRequest) -> None:
        """Abort the live requests that `abort` names."""

    def update_weights(self, command: WeightsCommand) -> None:
        """Carry out a command of an update."""
        if self.weights is None:
            message = "the weights of this engine cannot be changed"
            self.context.outbox.send(CommandReply(query_id=command.query_id, ok=False, message=message))
        else:
            self.weights.accept(command, self)

    def refuse(self, spec: GenerateRequest, failure: Failure) -> None:
        """Answer a request that is not live with a failure."""
        finish = FinishReason.failed(failure)
        self.context.outbox.log_end(spec, finish, 0)
        self.context.outbox.send(OutputBatch(outputs=[EngineCoreOutput(rid=spec.rid, token_ids=[], finish=finish)]))

    @property
    def is_drained(self) -> bool:
        """True when no request is live, no step or copy is under way, and no lease holds cached pages.

        Transfers of requests that are no longer live may still end: they write to no cached page.
        """
        copies = self.context.tier is not None and self.context.tier.num_running > 0
        nothing_runs = not self.role.live and not self.role.guests and not self.under_way and not copies
        return nothing_runs and self.context.memory.no_cached_page_is_held

    def change_weights(self, installed: InstalledWeights) -> None:
        """Drop all cached KV and past outputs. Rooms carry the name of the installed weights from now on."""
        self.facts.update(installed.facts)
        if self.context.speculation is not None:
            self.context.speculation.forget_past()
        self.context.memory.flush()
        self.context.flush_tier()
        if installed.namespace is not None and self.context.storage is not None:
            self.context.storage.change_namespace(installed.namespace)
        if self.kv is not None:
            self.kv.change_weights(installed.name)


class WeightsUpdater:
    """Carries out the commands of an update on one rank. `send` gives replies to the API process."""

    def __init__(self, weights: RankWeights, clock: Clock, send: Callable[[ToApi], None]) -> None:
        self._weights, self._clock, self._send = weights, clock, send
        self._preparing: Preparation | None = None
        self._is_wanted = True
        """False: the weights that are being loaded are dropped."""
        self._hold: HoldRequests | None = None
        self._has_replied = False
        """Whether the hold was answered: nothing runs."""
        self._deadline = 0.0
        self._held: dict[str, GenerateRequest] = {}
        self._withdrawn: set[str] = set()
        """Held requests that were admitted before."""
        self._install: InstallWeights | None = None
        self._is_ready = False
        """Whether other replicas were told that nothing runs here. They may install at any time, so no time ends it."""
        self._has_changed = False
        """Whether other weights were installed during the hold."""

    @property
    def is_pending(self) -> bool:
        """True while `poll` has to be called each turn."""
        return self._preparing is not None or self._hold is not None

    @property
    def num_held(self) -> int:
        """Requests that wait for the end of the hold."""
        return len(self._held)

    @property
    def num_withdrawn(self) -> int:
        """Held requests that were admitted before, and are not live."""
        return len(self._withdrawn)

    def takes(self, spec: GenerateRequest, scheduler: UpdatableWeights) -> bool:
        """Hold a new request while there is a hold; returns whether it is held.

        Health probes are held from `InstallWeights` on: other replicas may have other weights until the hold ends.
        """
        if self._hold is None or (spec.probe and self._install is None and not self._has_changed):
            return False
        if spec.rid in self._held or spec.rid in scheduler.role.live:
            error = RequestError(f"rid {spec.rid!r} is in use", field="rid", status=409, code="rid_in_use")
            scheduler.refuse(spec, Failure.from_error(error))
            return True
        self._held[spec.rid] = spec
        return True

    def accept(self, command: WeightsCommand, scheduler: UpdatableWeights) -> None:
        """Begin to carry out a command."""
        match command:
            case PrepareWeights() | PrepareTensors() | JoinGroup() | LeaveGroup():
                self._prepare(command)
            case HoldRequests():
                self._begin_hold(command, scheduler)
            case InstallWeights():
                if self._hold is None or not self._has_replied or self._install is not None:
                    self._reply(command, "no hold is in effect: requests may run")
                elif self._preparing is not None:
                    self._reply(command, "the weights are still being loaded")
                else:
                    self._install = command
            case EndWeightsUpdate():
                self._end(scheduler)
                self._reply(command)

    def aborted(self, abort: AbortRequest, scheduler: UpdatableWeights) -> None:
        """End the held requests that `abort` names."""
        for rid in list(self._held) if abort.rid is None else [abort.rid]:
            spec = self._held.pop(rid, None)
            if spec is not None:
                self._withdrawn.discard(rid)
                scheduler.refuse(spec, CLIENT_ABORT)

    def poll(self, scheduler: UpdatableWeights) -> None:
        """Go on with what is pending. Called once a turn."""
        if self._preparing is not None:
            self._poll_load(self._preparing)
        hold = self._hold
        if hold is None:
            return
        if scheduler.is_drained:
            if not self._has_replied:
                self._has_replied = True
                self._deadline += SWAP_S  # other replicas may have requests until then
                self._reply(hold)
            elif self._install is not None:
                self._is_ready = True
                if self._weights.may_install(self._install.query_id):
                    self._swap(self._install, scheduler)
        if self._clock.now() > self._deadline and not (self._install is not None and self._is_ready):
            late = self._install if self._has_replied else hold
            if late is not None:
                self._reply(late, f"requests have not ended within {hold.timeout_s:g} s")
            self._release(scheduler)

    # ------------------------------------------------------------------ inside

    def _swap(self, install: InstallWeights, scheduler: UpdatableWeights) -> None:
        self._install, self._has_changed = None, True
        scheduler.change_weights(self._weights.install(install.weight_version))
        self._deadline = self._clock.now() + SWAP_S
        self._reply(install)

    def _prepare(self, command: Preparation) -> None:
        if self._preparing is not None:
            why = "other weights are being loaded"
            self._weights.refuse(command.query_id, why)
            self._reply(command, why)
            return
        self._weights.drop()
        self._preparing, self._is_wanted = command, True
        self._weights.begin(command)

    def _poll_load(self, command: Preparation) -> None:
        failure = self._weights.loaded()
        if failure is None:
            return
        self._preparing = None
        if not self._is_wanted or isinstance(command, JoinGroup | LeaveGroup):
            self._weights.drop()
        # not final: the caller begins no other load while a replica still loads
        self._reply(command, failure or ("" if self._is_wanted else "the update was ended"), is_final=False)

    def _begin_hold(self, command: HoldRequests, scheduler: UpdatableWeights) -> None:
        if self._hold is not None:
            self._reply(command, "another update holds the requests")
            return
        self._hold, self._has_replied, self._has_changed, self._is_ready = command, False, False, False
        self._deadline = self._clock.now() + command.timeout_s
        if command.abort_all:
            scheduler.abort_requests(AbortRequest(rid=None))
        else:
            for spec in scheduler.role.withdraw_queued():
                self._held[spec.rid] = spec
                self._withdrawn.add(spec.rid)
        if scheduler.paused and scheduler.role.live:
            self._reply(command, f"generation is paused with {len(scheduler.role.live)} requests, which cannot end")
            self._release(scheduler)

    def _end(self, scheduler: UpdatableWeights) -> None:
        self._is_wanted = False
        self._weights.end_wait()
        if self._preparing is None:
            self._weights.drop()
        if self._install is not None:
            self._reply(self._install, "the update was ended")
        self._release(scheduler)

    def _release(self, scheduler: UpdatableWeights) -> None:
        """End the hold, and admit the held requests."""
        self._hold, self._install = None, None
        held, withdrawn = self._held, self._withdrawn
        self._held, self._withdrawn = {}, set()
        for rid, spec in held.items():
            if self._has_changed and (spec.prior_output_ids or spec.kv_tokens):
                scheduler.refuse(spec, WEIGHTS_CHANGED)
            else:
                scheduler.admit_request(spec, again=rid in withdrawn)

    def _reply(self, command: WeightsCommand, failure: str = "", *, is_final: bool = True) -> None:
        """Answer a command. `is_final`: a failure ends it at once, also where other replicas carry it out."""
        if failure:
            log.warning("update of the weights: %s", failure)
        message, is_final = failure or "ok", bool(failure) and is_final
        self._send(CommandReply(query_id=command.query_id, ok=not failure, message=message, is_final=is_final))
