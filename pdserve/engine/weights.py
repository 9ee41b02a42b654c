"""The weights of a rank as its scheduler updates them; `scheduler/weights_update.py` has the order of an update.

    PrepareWeights in the input log ──> each rank loads on a thread ── WeightsLoaded ──> rank 0
    rank 0     all ranks have ended ── Answer: why they cannot be used, or nothing ──> all ranks, in the same turn
    InstallWeights ──> all ranks swap ── rank 0's Answer: version and fingerprint ──> what rooms carry

No turn waits for a rank that loads. Scheduler thread of each rank.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

import msgspec

from pdserve.engine.assemble import Fact
from pdserve.engine.replica import ReplicaEngine
from pdserve.errors import ModelError, PdserveError
from pdserve.executor.factory import LoadedEngine
from pdserve.executor.weights import PreparedWeights, TensorInMemory, WeightsLoader, WeightsSource
from pdserve.executor.weights_group import GroupAddress
from pdserve.memory.page_keys import KeyNamespace
from pdserve.model.params import fingerprint_of
from pdserve.model.tensor_file import tensors_in
from pdserve.model.tensor_sources import TensorSource
from pdserve.protocol.weights import JoinGroup, LeaveGroup, Preparation, PrepareTensors, PrepareWeights, weights_name
from pdserve.ranks.input_log import InputLog
from pdserve.ranks.messages import ToLeader, Trouble, WeightsLoaded
from pdserve.scheduler.weights_update import InstalledWeights

log = logging.getLogger(__name__)

Announce = Callable[[Mapping[str, Fact], str], None]
"""Takes and reports facts of the engine; the text is `weights_name`."""


class _Loading:
    """The load of one rank: one at a time."""

    def __init__(self, built: LoadedEngine) -> None:
        assert built.weights is not None, "the factory makes it"
        self.loader: WeightsLoader = built.weights
        self.number = 0
        self.future: Future[PreparedWeights | None] | None = None
        """Its result is None after a command about a group."""
        self._rank = built.coord.rank

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
        for path in command.files:
            tensors = tensors_in(path)
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
    ) -> None:
        """`version`: name of the version of the weights in use. `change_keys`: called when others begin; it changes the
        keys of pages, and returns the namespace of the store, None without one.
        """
        self._engine, self._announce, self._change_keys = engine, announce, change_keys
        self._loading = _Loading(engine.built)
        self._version = version
        self._reports: tuple[WeightsLoaded, ...] = ()

    def begin(self, command: Preparation) -> None:
        """See `RankWeights.begin`."""
        self._loading.begin(command)

    def loaded(self) -> str | None:
        """See `RankWeights.loaded`."""
        group, found = self._engine.group, self._found()
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
            self._loading.install()
            engine.change_weights(
                [prepared.samples, *(one.samples for one in self._reports)],
                [one.draft_samples for one in self._reports],
                prepared.digest,
            )
            log.info("weights of all ranks: %s, from %s", engine.weights_fingerprint, prepared.source.path)
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

    def _found(self) -> str | None:
        """Return None while a rank loads, then why its weights cannot be used; empty: all have loaded."""
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
        prepared = None if failure else future.result()
        if prepared is not None:
            try:
                fingerprint_of([prepared.samples, *(one.samples for one in reports)])
            except ModelError as error:
                failure = str(error)
        if failure:
            self.drop()
        return failure


class FollowerWeights:
    """Implements `RankWeights` for a follower. `report` sends to rank 0, on any thread."""

    def __init__(self, built: LoadedEngine, inputs: InputLog, report: Callable[[ToLeader], None]) -> None:
        self._loading = _Loading(built)
        self._inputs, self._report = inputs, report

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
