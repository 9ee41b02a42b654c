"""The weights of a rank as its scheduler updates them; `scheduler/weights_update.py` has the order of an update.

    PrepareWeights in the input log ──> each rank loads on a thread ── WeightsLoaded ──> rank 0
    rank 0     all ranks have ended ── Answer: why they cannot be used, or nothing ──> all ranks, in the same turn
    InstallWeights ──> all ranks swap ── rank 0's Answer: version and fingerprint ──> what rooms carry

With DP attention the ranks 0 of all replicas share what they loaded, and swap behind the same round (`dp_sync`). No
turn waits for a rank that loads. Scheduler thread of each rank.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import msgspec

from pdserve.engine.assemble import Fact
from pdserve.engine.replica import ReplicaEngine
from pdserve.errors import ModelError, PdserveError
from pdserve.executor.factory import LoadedEngine
from pdserve.executor.weights import PreparedWeights, WeightsLoader, WeightsSource
from pdserve.executor.weights_group import GroupAddress
from pdserve.memory.page_keys import KeyNamespace
from pdserve.model.params import WeightSamples, fingerprint_of
from pdserve.model.tensor_file import tensors_in
from pdserve.model.tensor_sources import TensorInMemory, TensorSource
from pdserve.protocol.weights import JoinGroup, LeaveGroup, Preparation, PrepareTensors, PrepareWeights, weights_name
from pdserve.ranks.dp_sync import WeightsReport
from pdserve.ranks.input_log import InputLog
from pdserve.ranks.messages import ToLeader, Trouble, WeightsLoaded
from pdserve.scheduler.weights_update import InstalledWeights

log = logging.getLogger(__name__)

Announce = Callable[[Mapping[str, Fact], str], None]
"""Takes and reports facts of the engine; the text is `weights_name`."""


UNNAMED = (
    "new weights have the name of the former ones, %s@%s: a pair does not notice while its servers differ. Give each "
    "update a weight_version of its own"
)
"""Logged where neither the name of the version nor the sample behind the fingerprint changes."""


class _Loading:
    """The load of one rank of replica `dp_rank`: one at a time."""

    def __init__(self, built: LoadedEngine, dp_rank: int) -> None:
        assert built.weights is not None, "the factory makes it"
        self.loader: WeightsLoader = built.weights
        self.number = 0
        self.future: Future[PreparedWeights | None] | None = None
        """Its result is None after a command about a group."""
        self._rank = dp_rank * built.coord.shape.num_ranks + built.coord.rank
        """Number among the ranks of all replicas."""

    def begin(self, command: Preparation, then: Callable[[Future[PreparedWeights | None]], None] | None = None) -> None:
        """Begin what `command` says, on a thread."""
        self.number += 1
        present, groups = self.loader.source, self.loader.groups
        match command:
            case PrepareWeights():
                path, load_format = command.model_path or present.path, command.load_format or present.load_format
                self.future = self.loader.prepare(WeightsSource(path, load_format))
            case PrepareTensors():
                self.future = self.loader.prepare(
                    dataclasses.replace(present, read_tensors=partial(self._read, command))
                )
            case JoinGroup():
                address = GroupAddress(
                    command.name, command.host, command.port, command.rank_offset + self._rank, command.world_size,
                    command.backend, command.timeout_s,
                )  # fmt: skip
                self.future = self.loader.run(lambda: groups.join(address))
            case LeaveGroup():
                self.future = self.loader.run(lambda: groups.leave(command.name))
        if then is not None:
            self.future.add_done_callback(then)

    def _read(self, command: PrepareTensors) -> Mapping[str, TensorSource]:
        """Return the tensors of `command`. On the thread that loads."""
        if command.group:
            received = self.loader.groups.receive(command.group, command.sent)
            return {name: TensorInMemory(tensor) for name, tensor in received.items()}
        found: dict[str, TensorSource] = {}
        for path, given_name in zip(command.files, command.names, strict=True):
            tensors = tensors_in(path, given_name)
            twice = found.keys() & tensors.keys()
            if twice:
                raise ModelError(f"the tensor {min(twice)} is given twice")
            found |= tensors
        return found

    def install(self) -> bool:
        """Compute with what is loaded; False: nothing is."""
        future, self.future = self.future, None
        prepared = None if future is None else future.result()
        if prepared is None:
            return False
        self.loader.install(prepared)
        return True

    def drop(self) -> None:
        """Forget what is loaded. A load under way goes on, and its result is dropped."""
        self.future = None


_NAMES = msgspec.msgpack.Encoder()
_DECODED = msgspec.msgpack.Decoder(tuple[str, KeyNamespace | None])
"""What rank 0 tells of installed weights, see `InstalledWeights`."""


class LeaderWeights:
    """Implements `RankWeights` for rank 0."""

    def __init__(
        self,
        engine: ReplicaEngine,
        version: str,
        announce: Announce,
        change_keys: Callable[[], KeyNamespace | None],
        dp_rank: int = 0,
    ) -> None:
        """`version`: name of the version of the weights in use. `change_keys`: called when others begin; it changes the
        keys of pages, and returns the namespace of the store, None without one.
        """
        self._engine, self._announce, self._change_keys = engine, announce, change_keys
        self._loading = _Loading(engine.built, dp_rank)
        self._version = version
        self._reports: tuple[WeightsLoaded, ...] = ()
        self._query_id = ""
        """The command that is carried out."""
        self._outcome: str | None = None
        """What this replica's load has come to; None: not yet."""
        self._is_wanted = True
        self._others: Sequence[WeightSamples] = ()
        """Samples of the ranks of other replicas that compute with this one."""

    def begin(self, command: Preparation) -> None:
        """See `RankWeights.begin`."""
        self._query_id, self._outcome, self._is_wanted, self._others = command.query_id, None, True, ()
        self._loading.begin(command)

    def refuse(self, query_id: str, why: str) -> None:
        """See `RankWeights.refuse`."""
        if self._engine.dp_sync is not None:
            self._engine.dp_sync.refuse_load(query_id, why)

    def end_wait(self) -> None:
        """See `RankWeights.end_wait`."""
        self._is_wanted = False

    def may_install(self, query_id: str) -> bool:
        """See `RankWeights.may_install`."""
        dp_sync, group = self._engine.dp_sync, self._engine.group
        if dp_sync is None:
            return True
        return dp_sync.may_swap(query_id) if group is None else group.log.answer(lambda: dp_sync.may_swap(query_id))

    def loaded(self) -> str | None:
        """See `RankWeights.loaded`."""
        group, found = self._engine.group, self._agreed()
        if group is None:
            return found
        if not group.log.answer(lambda: found is not None):
            return None
        assert found is not None
        return group.log.answer(found.encode).decode()

    def install(self, version: str | None) -> InstalledWeights:
        """See `RankWeights.install`."""
        engine, group = self._engine, self._engine.group
        future = self._loading.future
        prepared = None if future is None else future.result()
        if prepared is not None:
            former = engine.weights_fingerprint
            self._loading.install()
            engine.change_weights(
                [prepared.samples, *(one.samples for one in self._reports), *self._others],
                [one.draft_samples for one in self._reports],
                prepared.digest,
            )
            log.info("weights of all ranks: %s, from %s", engine.weights_fingerprint, prepared.source.path)
            if engine.weights_fingerprint == former and version in (None, self._version):
                log.warning(UNNAMED, self._version, former)
        self._version = self._version if version is None else version
        source = self._loading.loader.source
        facts: dict[str, Fact] = {
            "weights_fingerprint": engine.weights_fingerprint,
            "weight_version": self._version,
            "weights_path": source.path,
            "weights_load_format": source.load_format,
        }
        weights = weights_name(self._version, engine.weights_fingerprint)
        namespace = None if prepared is None else self._change_keys()
        if group is not None:
            group.log.answer(lambda: _NAMES.encode((weights, namespace)))
        self._announce(facts, weights)
        return InstalledWeights(weights, facts, namespace)

    def drop(self) -> None:
        """See `RankWeights.drop`."""
        self._loading.drop()
        self._reports = ()

    def _agreed(self) -> str | None:
        """Return what all replicas that compute together have come to; None while a rank of one of them loads."""
        dp_sync = self._engine.dp_sync
        if self._outcome is None:
            self._outcome = self._found()
            if self._outcome is not None and dp_sync is not None:
                dp_sync.report_weights(self._report(self._outcome))
        if self._outcome is None or dp_sync is None or not self._is_wanted:
            return self._outcome
        reports = dp_sync.weights_reports(self._query_id)
        if reports is None:
            return None
        failure = self._outcome or next((one.failure for one in reports if one.failure), "")
        if not failure:
            self._others = [samples for one in reports for samples in one.samples]
            failure = self._difference(self._others)
        if failure:
            self.drop()
        return failure

    def _report(self, outcome: str) -> WeightsReport:
        future = self._loading.future
        prepared = None if outcome or future is None else future.result()
        samples = () if prepared is None else (prepared.samples, *(one.samples for one in self._reports))
        return WeightsReport(self._query_id, outcome, samples)

    def _difference(self, others: Sequence[WeightSamples] = ()) -> str:
        """Return how the weights of the ranks differ; empty: they do not. All ranks of this replica have loaded."""
        future = self._loading.future
        prepared = None if future is None else future.result()
        if prepared is None:
            return ""
        try:
            fingerprint_of([prepared.samples, *(one.samples for one in self._reports), *others])
        except ModelError as error:
            return str(error)
        return ""

    def _found(self) -> str | None:
        """Return None while a rank of this replica loads, then why its weights cannot be used; empty: all have."""
        future, group = self._loading.future, self._engine.group
        assert future is not None, "a load has begun"
        reports = () if group is None else group.followers.weights_loaded(self._loading.number)
        if not future.done() or reports is None:
            return None
        failure = failure_of(future)
        for rank, report in enumerate(reports, 1):
            if not failure and report.trouble is not None:
                failure = f"rank {rank}: {report.trouble.message}"
        self._reports = reports
        failure = failure or self._difference()
        if failure:
            self.drop()
        return failure


class FollowerWeights:
    """Implements `RankWeights` for a follower of replica `dp_rank`. `report` sends to rank 0, on any thread.

    `shares_steps`: whether replicas compute together (DP attention).
    """

    def __init__(
        self,
        built: LoadedEngine,
        inputs: InputLog,
        report: Callable[[ToLeader], None],
        dp_rank: int = 0,
        *,
        shares_steps: bool = False,
    ) -> None:
        self._loading = _Loading(built, dp_rank)
        self._inputs, self._report = inputs, report
        self._shares_steps = shares_steps

    def begin(self, command: Preparation) -> None:
        """See `RankWeights.begin`."""
        number = self._loading.number + 1

        def ended(future: Future[PreparedWeights | None]) -> None:
            error = future.exception()
            if error is not None:
                self._report(WeightsLoaded(number=number, trouble=Trouble.of(error)))
                return
            found = future.result()
            if found is None:
                self._report(WeightsLoaded(number=number))
            else:
                self._report(WeightsLoaded(number=number, samples=found.samples, draft_samples=found.draft_samples))

        self._loading.begin(command, ended)

    def refuse(self, query_id: str, why: str) -> None:
        """See `RankWeights.refuse`. Rank 0 tells them."""

    def end_wait(self) -> None:
        """See `RankWeights.end_wait`. Rank 0 waits."""

    def may_install(self, query_id: str) -> bool:
        """See `RankWeights.may_install`."""
        return bool(self._inputs.answer(_rank_0_knows)) if self._shares_steps else True

    def loaded(self) -> str | None:
        """See `RankWeights.loaded`."""
        if not self._inputs.answer(_rank_0_knows):
            return None
        answer = self._inputs.answer(_rank_0_knows)
        assert isinstance(answer, bytes)
        if answer:
            self.drop()
        return answer.decode()

    def install(self, version: str | None) -> InstalledWeights:
        """See `RankWeights.install`."""
        self._loading.install()
        answer = self._inputs.answer(_rank_0_knows)
        assert isinstance(answer, bytes)
        weights, namespace = _DECODED.decode(answer)
        return InstalledWeights(weights, {}, namespace)

    def drop(self) -> None:
        """See `RankWeights.drop`."""
        self._loading.drop()


def failure_of(future: Future[PreparedWeights | None]) -> str:
    """Return why a load has failed; empty: it has not."""
    error = future.exception()
    if error is None:
        return ""
    if not isinstance(error, PdserveError):
        log.error("weights cannot be loaded", exc_info=error)
    return Trouble.of(error).message


def _rank_0_knows() -> bool | bytes:
    raise AssertionError("rank 0 decides")
