"""The weights of a rank as its scheduler updates them; `scheduler/weights_update.py` has the order of an update.

    PrepareWeights in the input log ──> each rank loads on a thread ── WeightsLoaded ──> rank 0
    rank 0     all ranks have ended ── Answer: why they cannot be used, or nothing ──> all ranks, in the same turn
    InstallWeights ──> all ranks swap ── rank 0's Answer: version and fingerprint ──> what rooms carry

No turn waits for a rank that loads. Scheduler thread of each rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from pdserve.engine.assemble import Fact
from pdserve.engine.replica import ReplicaEngine
from pdserve.errors import ModelError, PdserveError
from pdserve.executor.factory import LoadedEngine
from pdserve.executor.weights import PreparedWeights, WeightsLoader, WeightsSource
from pdserve.model.params import fingerprint_of
from pdserve.protocol.weights import PrepareWeights, weights_name
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
        self.future: Future[PreparedWeights] | None = None

    def begin(self, command: PrepareWeights, then: Callable[[Future[PreparedWeights]], None] | None = None) -> None:
        """Begin to load what `command` names."""
        self.number += 1
        present = self.loader.source
        path, load_format = command.model_path or present.path, command.load_format or present.load_format
        self.future = self.loader.prepare(WeightsSource(path, load_format))
        if then is not None:
            self.future.add_done_callback(then)

    def install(self) -> bool:
        """Compute with what is loaded; False: nothing is."""
        future, self.future = self.future, None
        if future is None:
            return False
        self.loader.install(future.result())
        return True

    def drop(self) -> None:
        """Forget what is loaded. A load under way goes on, and its result is dropped."""
        self.future = None


class LeaderWeights:
    """Implements `RankWeights` for rank 0."""

    def __init__(self, engine: ReplicaEngine, version: str, announce: Announce) -> None:
        """`version`: name of the version of the weights in use."""
        self._engine, self._announce = engine, announce
        self._loading = _Loading(engine.built)
        self._version = version
        self._reports: tuple[WeightsLoaded, ...] = ()

    def begin(self, command: PrepareWeights) -> None:
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
        if future is not None:
            prepared = future.result()
            self._loading.install()
            engine.change_weights(
                [prepared.samples, *(one.samples for one in self._reports)],
                [one.draft_samples for one in self._reports],
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
        if group is not None:
            group.log.answer(weights.encode)
        self._announce(facts, weights)
        return InstalledWeights(weights, facts)

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
        if not failure:
            try:
                fingerprint_of([future.result().samples, *(one.samples for one in reports)])
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

    def begin(self, command: PrepareWeights) -> None:
        """See `RankWeights.begin`."""
        number = self._loading.number + 1

        def ended(future: Future[PreparedWeights]) -> None:
            error = future.exception()
            if error is not None:
                self._report(WeightsLoaded(number=number, trouble=Trouble.of(error)))
                return
            found = future.result()
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
        return InstalledWeights(answer.decode(), {})

    def drop(self) -> None:
        """See `RankWeights.drop`."""
        self._loading.drop()


def failure_of(future: Future[PreparedWeights]) -> str:
    """Return why a load has failed; empty: it has not."""
    error = future.exception()
    if error is None:
        return ""
    if not isinstance(error, PdserveError):
        log.error("weights cannot be loaded", exc_info=error)
    return Trouble.of(error).message


def _rank_0_knows() -> bool | bytes:
    raise AssertionError("rank 0 decides")
